"""When an op is proved: at its first use, once, and not where that is not allowed."""

import threading
import time

import pytest
import torch

from deepfast import backend, ops
from deepfast.backend import BackendError
from deepfast.cli import main
from deepfast.proof import known
from deepfast.proof import table as tables

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _only_float32(monkeypatch):
    whole = backend.provable
    monkeypatch.setattr(
        backend, "provable", lambda op, at: {by: ["float32"] for by in whole(op, at)}
    )


def norm(x=None):
    return ops.layer_norm(torch.randn(3, 8) if x is None else x, None, None)


def served():
    return backend.preview("layer_norm", None, "cpu", torch.float32, 8)[0]


def test_an_op_is_proved_once(device, cache):
    for _ in range(3):
        norm()
    backend.forget()
    norm()
    assert device.runs == 1
    assert served() == "triton"
    assert len(list(cache.glob("*.json"))) == 1


def test_another_op_is_not_proved_with_it(device):
    norm()
    assert known.entry("activation", CPU, "float32", None) is None


def test_float64_is_the_references(device):
    norm(torch.randn(3, 8, dtype=torch.float64))
    assert device.runs == 0


def test_a_request_proves_nothing(device):
    ops.layer_norm(torch.randn(3, 8), None, None, backend="triton")
    assert device.runs == 0


def test_backward_does_not_prove(device, caplog):
    """The answer is not kept: outside, the op is proved."""

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return norm(dx.detach())

    Inside.apply(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert device.runs == 0
    assert "not proved on this device and cannot be in backward" in caplog.text
    norm()
    assert device.runs == 1
    assert served() == "triton"


def test_a_capture_does_not_prove(device, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    norm(), norm()
    assert device.runs == 0
    assert caplog.text.count("cannot be in the capture of a CUDA graph") == 1


def test_tracing_does_not_prove(device, caplog):
    with torch._subclasses.FakeTensorMode():
        backend.choose("layer_norm", None, "cpu", torch.float32, 8)
    assert device.runs == 0
    assert "cannot be while a compiler traces it" in caplog.text


def test_compiling_attention_does_not_prove(device, caplog):
    """Its backend is a constant of the graph."""
    cu = torch.tensor([0, 3], dtype=torch.int32)

    @torch.compile(backend="eager", dynamic=True)
    def attend(q, longest):
        return ops.attention(
            q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest
        )

    attend(torch.randn(3, 2, 8), 3)
    assert device.runs == 0
    assert "attention is not proved on this device and cannot be while a compiler" in caplog.text


def test_off_never_proves_and_uses_what_is_known(device, monkeypatch):
    monkeypatch.setenv("DEEPFAST_PROOF", "off")
    norm()
    assert device.runs == 0
    assert served() == "cpu"
    monkeypatch.delenv("DEEPFAST_PROOF")
    backend.forget()
    norm()
    monkeypatch.setenv("DEEPFAST_PROOF", "off")
    backend.forget()
    with backend.record() as seen:
        norm()
    assert seen == [("layer_norm", "triton")]


def test_require_refuses_what_is_not_proved(device, broken, monkeypatch):
    monkeypatch.setenv("DEEPFAST_PROOF", "require")
    with pytest.raises(
        BackendError, match="require: layer_norm float32 has no proved kernel on cpu"
    ):
        norm()
    monkeypatch.delenv("DEEPFAST_PROOF")
    broken(("triton",), "raises")
    norm()
    monkeypatch.setenv("DEEPFAST_PROOF", "require")
    backend.forget()
    with pytest.raises(BackendError, match=r"has no proved kernel .*broken on purpose"):
        norm()


def test_a_wrong_mode_is_one_sentence(device, monkeypatch):
    monkeypatch.setenv("DEEPFAST_PROOF", "never")
    with pytest.raises(ValueError, match="expected one of auto, off, require, got 'never'"):
        norm()


def test_one_thread_proves_and_the_others_wait(device, monkeypatch):
    chosen, load = [], tables.load
    # So that all threads read the table before one has it.
    monkeypatch.setattr(tables, "load", lambda key: time.sleep(0.1) or load(key))
    threads = [threading.Thread(target=lambda: chosen.append(backend.choose(
        "layer_norm", None, CPU, torch.float32, 8)[0])) for _ in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == ["triton"] * 4
    assert device.runs == 1


def test_threads_that_load_a_table_at_once_share_it(device, monkeypatch):
    both, load, found = threading.Barrier(2), tables.load, []

    def load_at_once(key):
        both.wait(60)
        return load(key)

    monkeypatch.setattr(tables, "load", load_at_once)
    threads = [
        threading.Thread(target=lambda: found.append(known.table(CPU, None))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]


def test_a_folder_that_cannot_be_written_keeps_the_table_here(device, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPFAST_CACHE", str(tmp_path / "file" / "cache"))
    norm(), norm()
    assert served() == "triton"
    assert device.runs == 1


def test_each_kind_of_gpu_has_its_own_table(device, monkeypatch):
    """A bare "cuda" is none of them where they differ."""
    names = ["card a", "card b", "card b"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda at: names[getattr(at, "index", at)])
    monkeypatch.setattr(tables, "_driver", lambda: "1.0")
    a, b = torch.device("cuda:0"), torch.device("cuda:1")
    entry = {"errors": {"triton": None}, "seconds": {}}
    known.table(a, None).ops["layer_norm"] = {"bfloat16": entry}
    explain = backend.explain
    assert explain("layer_norm", a, torch.bfloat16)["triton"] is None
    assert "not proved here" in explain("layer_norm", b, torch.bfloat16)["triton"]
    assert "GPUs are of several kinds" in explain("layer_norm", "cuda", torch.bfloat16)["triton"]
    known.table(b, None).ops["layer_norm"] = {"bfloat16": entry}
    assert known.table(torch.device("cuda:2"), None) is known.table(b, None)
    names[0], current = "card b", lambda: 1
    monkeypatch.setattr(torch.cuda, "current_device", current)
    assert explain("layer_norm", "cuda", torch.bfloat16)["triton"] is None


def test_attention_is_chosen_by_length(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda at: "card")
    monkeypatch.setattr(tables, "_driver", lambda: "1.0")
    at = torch.device("cuda:0")
    short, long = ({"triton": a, "sdpa": b} for a, b in ((1.0, 2.0), (2.0, 1.0)))
    entry = {"errors": {"triton": None}, "seconds": {"64": short, "512": short, "4096": long}}
    known.table(at, None).ops["attention"] = {"bfloat16": entry}
    for length, name in ((40, "triton"), (500, "triton"), (513, "sdpa"), (4000, "sdpa")):
        width = backend.attention_width(at, length, 3)
        assert backend.choose("attention", None, at, torch.bfloat16, width)[0] == name


def test_heads_that_a_kernel_cannot_hold_are_torchs(device):
    """By itself; on request they are an error."""
    cu, q = torch.tensor([0, 2], dtype=torch.int32), torch.randn(2, 1, 257)
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 2, "max_seqlen_k": 2}
    entry = {"errors": {"triton": None}, "seconds": {}}
    known.table(CPU, backend.cuda_build()).ops["attention"] = {"float32": entry}
    with backend.record() as seen:
        o = ops.attention(q, q, q, **sizes)
    assert seen == [("attention", "triton")]
    expected = ops.attention(q, q, q, **sizes, backend="sdpa")
    torch.testing.assert_close(o, expected)
    with pytest.raises(ValueError, match="heads are at most 256 wide, got 257"):
        ops.attention(q, q, q, **sizes, backend="triton")


def test_ranks_without_a_store_do_not_compare(device, monkeypatch, caplog):
    """With MPI. Each has its own answer, and a line says so."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: None)
    norm()
    backend.forget()
    norm()
    assert served() == "triton"
    assert caplog.text.count("has no store (as with MPI): the ranks do not compare") == 1


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_proves_and_prints(device, monkeypatch, capsys, tmp_path):
    words = ["--device", "cpu", "--op", "layer_norm", "--write", str(tmp_path / "t.json")]
    assert main(["prove", *words]) == 0
    assert "layer_norm float32: triton is proved\nkept in " in capsys.readouterr().out
    assert "layer_norm" in (tmp_path / "t.json").read_text()
    assert main(["info", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert f"proof    {known.table(CPU, None).source}; a GPU proves" in text
    assert "    layer_norm float32: triton is proved\n" in text
    assert "\nlayer_norm: triton\n" in text
    assert device.runs == 1


def test_the_command_fails_with_a_kernel(device, broken, capsys):
    broken(("triton",), "raises")
    assert main(["prove", "--device", "cpu", "--op", "layer_norm", "--json"]) == 1
    assert "broken on purpose" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--op", "softmax"), "--op: expected one of layer_norm, "),
     (("--device", "tpu9"), "--device: expected a GPU such as cuda:1, got 'tpu9'"),
     (("--device", "cpu"), "elsewhere there is nothing to prove"),
     (("--device", "cuda:99"), "--device: expected a device of this machine, got 'cuda:99'")],
)  # fmt: skip
def test_the_command_refuses_in_one_sentence(capsys, words, said):
    assert main(["prove", *words]) == 1
    assert said in capsys.readouterr().err
