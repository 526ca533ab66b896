"""When an op is proved: at its first use, once, and not where that is not allowed."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepfast import backend, ops
from deepfast.backend import BackendError, explain
from deepfast.cli import main
from deepfast.proof import known
from deepfast.proof import table as tables

CPU = torch.device("cpu")


def norm(x=None):
    return ops.layer_norm(torch.randn(3, 8) if x is None else x, None, None)


def served(op="layer_norm", device="cpu", dtype=torch.float32, width=8):
    return backend.preview(op, None, device, dtype, width)[0]


def test_an_op_is_proved_once(device, cache, caplog):
    for _ in range(3):
        norm()
    backend.forget()
    norm()
    assert device.runs == 1
    assert served() == "triton"
    assert len(list(cache.glob("*.json"))) == 1
    # Another op is not proved with it.
    assert known.entry("activation", CPU, "float32", None) is None
    first, last = (record.getMessage() for record in caplog.records)
    assert "layer_norm is used on cpu for the first time" in first
    assert "triton is proved; kept in " in last


def test_float64_and_a_request_prove_nothing(device):
    norm(torch.randn(3, 8, dtype=torch.float64))
    ops.layer_norm(torch.randn(3, 8), None, None, backend="triton")
    assert device.runs == 0


# ---- where nothing can be proved -----------------------------------------------------------------


def in_backward(_):
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return norm(dx.detach())

    Inside.apply(torch.randn(3, 8, requires_grad=True)).sum().backward()


def in_a_capture(patch):
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    norm(), norm()


def under_fake_tensors(_):
    with torch._subclasses.FakeTensorMode():
        backend.choose("layer_norm", None, "cpu", torch.float32, 8)


def in_compiled_attention(_):
    """Its backend is a constant of the graph."""
    cu = torch.tensor([0, 3], dtype=torch.int32)

    @torch.compile(backend="eager", dynamic=True)
    def attend(q, longest):
        return ops.attention(
            q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest
        )

    attend(torch.randn(3, 2, 8), 3)


@pytest.mark.parametrize(
    ("run", "said"),
    [(in_backward, "layer_norm is not proved on this device and cannot be in backward"),
     (in_a_capture, "cannot be in the capture of a CUDA graph"),
     (under_fake_tensors, "cannot be while a compiler traces it"),
     (in_compiled_attention, "attention is not proved on this device and cannot be while a comp")],
)  # fmt: skip
def test_not_now(device, monkeypatch, caplog, run, said):
    """It is said once, and outside the op is proved."""
    with monkeypatch.context() as patch:
        run(patch)
    assert device.runs == 0
    assert caplog.text.count(said) == 1
    norm()
    assert device.runs == 1
    assert served() == "triton"


def test_off_never_proves_and_uses_what_is_known(device, monkeypatch):
    for mode, runs, name in (("off", 0, "cpu"), ("auto", 1, "triton"), ("off", 1, "triton")):
        monkeypatch.setenv("DEEPFAST_PROOF", mode)
        backend.forget()
        with backend.record() as seen:
            norm()
        assert (seen, device.runs) == ([("layer_norm", name)], runs)


def test_require_refuses_what_is_not_proved(device, monkeypatch):
    monkeypatch.setenv("DEEPFAST_PROOF", "require")
    with pytest.raises(BackendError, match="layer_norm float32 has no proved kernel on cpu"):
        norm()
    monkeypatch.delenv("DEEPFAST_PROOF")
    monkeypatch.setattr(device, "error", "broken on purpose")
    norm()
    monkeypatch.setenv("DEEPFAST_PROOF", "require")
    backend.forget()
    with pytest.raises(BackendError, match=r"has no proved kernel .*broken on purpose"):
        norm()


def test_a_wrong_mode_is_one_sentence(device, monkeypatch):
    monkeypatch.setenv("DEEPFAST_PROOF", "never")
    with pytest.raises(ValueError, match="expected one of auto, off, require, got 'never'"):
        norm()


# ---- threads, folders, devices, ranks ------------------------------------------------------------


def in_threads(count, call):
    with ThreadPoolExecutor(count) as pool:
        return [made.result() for made in [pool.submit(call) for _ in range(count)]]


def test_one_thread_proves_and_the_others_wait(device, monkeypatch):
    load = tables.load
    # So that all threads read the table before one has it.
    monkeypatch.setattr(tables, "load", lambda key: time.sleep(0.1) or load(key))
    chosen = in_threads(4, lambda: backend.choose("layer_norm", None, CPU, torch.float32, 8)[0])
    assert chosen == ["triton"] * 4
    assert device.runs == 1


def test_threads_that_load_a_table_at_once_share_it(device, monkeypatch):
    both, load = threading.Barrier(2), tables.load
    monkeypatch.setattr(tables, "load", lambda key: both.wait(60) * 0 or load(key))
    first, second = in_threads(2, lambda: known.table(CPU, None))
    assert first is second


def test_a_folder_that_cannot_be_written_keeps_the_table_here(device, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPFAST_CACHE", str(tmp_path / "file" / "cache"))
    norm(), norm()
    assert served() == "triton"
    assert device.runs == 1


@pytest.fixture
def cards(device, monkeypatch):
    """``cards(names, current)``: the machine has these GPUs."""

    def given(names, current=0):
        name = lambda at: names[getattr(at, "index", at)]  # noqa: E731
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", name)
        monkeypatch.setattr(tables, "_driver", lambda: "1.0")

    return given


FINE = {"errors": {"triton": None}, "seconds": {}}


def test_each_kind_of_gpu_has_its_own_table(cards):
    """A bare "cuda" is none of them where they differ."""
    cards(["card a", "card b", "card b"])
    a, b = torch.device("cuda:0"), torch.device("cuda:1")

    def reason(device):
        return explain("layer_norm", device, torch.bfloat16)["triton"]

    known.table(a, None).ops["layer_norm"] = {"bfloat16": FINE}
    assert reason(a) is None
    assert "not proved here" in reason(b)
    assert "GPUs are of several kinds" in reason("cuda")
    known.table(b, None).ops["layer_norm"] = {"bfloat16": FINE}
    assert known.table(torch.device("cuda:2"), None) is known.table(b, None)
    cards(["card b"] * 3, current=1)
    assert reason("cuda") is None


def test_attention_is_chosen_by_length(cards):
    cards(["card"])
    at = torch.device("cuda:0")
    short, long = ({"triton": a, "sdpa": b} for a, b in ((1.0, 2.0), (2.0, 1.0)))
    entry = FINE | {"seconds": {"64": short, "512": short, "4096": long}}
    known.table(at, None).ops["attention"] = {"bfloat16": entry}
    for length, name in ((40, "triton"), (500, "triton"), (513, "sdpa"), (4000, "sdpa")):
        width = backend.attention_width(at, length, 3)
        assert served("attention", at, torch.bfloat16, width) == name


def test_heads_that_a_kernel_cannot_hold_are_torchs(device):
    """By itself; on request they are an error."""
    cu, q = torch.tensor([0, 2], dtype=torch.int32), torch.randn(2, 1, 257)
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 2, "max_seqlen_k": 2}
    known.table(CPU, backend.cuda_build()).ops["attention"] = {"float32": FINE}
    with backend.record() as seen:
        o = ops.attention(q, q, q, **sizes)
    assert seen == [("attention", "triton")]
    torch.testing.assert_close(o, ops.attention(q, q, q, **sizes, backend="sdpa"))
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


def test_the_command_proves_and_prints(device, capsys, tmp_path):
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


def test_the_command_fails_with_a_kernel(device, monkeypatch, capsys):
    monkeypatch.setattr(device, "error", "broken on purpose")
    assert main(["prove", "--device", "cpu", "--op", "layer_norm", "--json"]) == 1
    assert "broken on purpose" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--op", "softmax"), "--op: expected one of layer_norm, "),
     (("--device", "tpu9"), "--device: expected a GPU such as cuda:1 (elsewhere"),
     (("--device", "cpu"), "elsewhere there is nothing to prove"),
     (("--device", "cuda:99"), "--device: expected a device of this machine, got 'cuda:99'")],
)  # fmt: skip
def test_the_command_refuses_in_one_sentence(capsys, words, said):
    assert main(["prove", *words]) == 1
    assert said in capsys.readouterr().err
