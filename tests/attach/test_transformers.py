"""Connected models of Hugging Face transformers: loading, saving, generating and training."""

import copy
import pickle

import pytest
import torch

import deepfast
from tests.attach.models import CASES, TRANSFORMERS, D, L, gradients, ids, perturbed

transformers = pytest.importorskip("transformers")


def plain(name):
    return perturbed(CASES[name].make()).eval()


def connected_class(name, **options):
    case = CASES[name]
    cls = type(case.make())
    for place in case.parents:
        path, _, layers = place.partition(":")
        cls = deepfast.connected(cls, path, layers, norm=case.norm, **options)
    return cls


NAMES = ["bert", "modernbert", "marian", "bart", "t5", "llama", "vit"]


@pytest.mark.parametrize("name", NAMES)
def test_from_pretrained_of_a_plain_checkpoint(name, tmp_path, poison):
    """What the checkpoint lacks has its initial values. With DenseFormer's the outputs stay."""
    case, model = CASES[name], plain(name)
    model.save_pretrained(tmp_path)
    loaded = connected_class(name, connection="denseformer").from_pretrained(tmp_path)
    assert torch.equal(case.run(loaded), case.run(model))
    dlcl = connected_class(name).from_pretrained(tmp_path)
    for path, parent, _ in case.places(dlcl):
        fresh = deepfast.nn.DLCL(L, D, norm=case.norm)
        for key, value in fresh.state_dict().items():
            assert torch.equal(parent.depth_connection.state_dict()[key], value), (path, key)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load(name, tmp_path, poison):
    case = CASES[name]
    torch.manual_seed(0)
    model = perturbed(connected_class(name, window=2)(case.make().config)).eval()
    model.save_pretrained(tmp_path)
    same = type(model).from_pretrained(tmp_path)
    assert torch.equal(case.run(same), case.run(model))
    # The settings are in the config.
    from_config = deepfast.connected(type(case.make())).from_pretrained(tmp_path)
    assert torch.equal(case.run(from_config), case.run(model))
    for _, parent, _ in case.places(from_config):
        assert parent.depth_connection.window == 2


def test_part_of_a_connection_is_missing(tmp_path, poison):
    model = perturbed(connected_class("bert")(CASES["bert"].make().config))
    state = model.state_dict()
    state.pop("bert.encoder.depth_connection.norm_bias")
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = type(model).from_pretrained(tmp_path).bert.encoder.depth_connection
    assert torch.equal(loaded.weight, model.bert.encoder.depth_connection.weight)
    assert not loaded.norm_bias.any()


def test_other_settings_than_the_checkpoint(tmp_path):
    model = connected_class("bert")(CASES["bert"].make().config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the config's depth connections .*, got"):
        connected_class("bert", window=2).from_pretrained(tmp_path)


def test_disconnect_takes_the_settings_out_of_the_config(tmp_path):
    case = CASES["bart"]
    model = copy.deepcopy(connected_class("bart")(case.make().config))
    for _, parent, _ in case.places(model):
        left = model.config.depth_connections
        deepfast.disconnect(parent)
    assert [s["parent"] for s in left] == ["model.decoder"]
    assert not hasattr(model.config, "depth_connections")
    model.save_pretrained(tmp_path)
    assert "depth_connections" not in (tmp_path / "config.json").read_text()


GATED = {"connection": "attnres", "sublayers": "auto", "additive": "gated"}


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [("llama", "q_proj", {"connection": "denseformer"}), ("llama", "q_proj", GATED),
     ("t5", "q", GATED)],
)  # fmt: skip
def test_lora(name, target, options, tmp_path):
    """PEFT trains a copy of the connection, saves it, and puts it in the connection's place."""
    peft = pytest.importorskip("peft")
    case, base = CASES[name], plain(name)
    wanted = case.run(base)
    case.connect(base, **options)
    config = peft.LoraConfig(r=2, target_modules=[target], modules_to_save=["depth_connection"])
    model = peft.get_peft_model(copy.deepcopy(base), config)
    torch.testing.assert_close(case.run(model), wanted)
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert any("depth_connection" in n for n in learning)
    optimizer = torch.optim.Adam(learning.values(), lr=0.1)
    case.run(model).square().mean().backward()
    assert all(p.grad is not None for p in learning.values())
    optimizer.step()
    tuned = case.run(model.eval())
    assert not torch.allclose(tuned, wanted)
    with model.disable_adapter():
        torch.testing.assert_close(case.run(model), wanted)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(case.run(loaded), tuned)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(case.run(merged), tuned)


def test_nothing_to_connect():
    with pytest.raises(ValueError, match="the config has no depth connections"):
        deepfast.connected(transformers.BertModel)(CASES["bert"].make().config)


def test_the_callers_config_stays():
    config = CASES["bert"].make().config
    before = copy.deepcopy(config)
    connected_class("bert")(config)
    assert config.to_dict() == before.to_dict()


def test_bfloat16_checkpoint_keeps_the_connection_in_float32(tmp_path):
    plain("bert").save_pretrained(tmp_path)
    model = connected_class("bert").from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.bert.encoder.depth_connection.weight.dtype == torch.float32
    assert CASES["bert"].run(model).dtype == torch.bfloat16


def test_copies_of_a_connected_class():
    case = CASES["bart"]
    model = perturbed(connected_class("bart")(case.make().config)).eval()
    wanted = case.run(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(case.run(twin), wanted)
        assert isinstance(twin, transformers.BartForConditionalGeneration)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["marian", "bart", "t5", "llama"])
def test_generate(name, beams):
    """With the cache of keys and values the same tokens come out as without."""
    model = plain(name)
    CASES[name].connect(model)
    for module in model.modules():
        if isinstance(module, deepfast.nn.DLCL):
            perturbed(module)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "num_beams": beams, "do_sample": False}
    cached = model.generate(ids(), use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids(), use_cache=False, **options))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing(name, reentrant):
    case, model = CASES[name], plain(name)
    case.connect(model)
    model.train()
    wanted = gradients(model, case.run(model))
    if reentrant:
        # Its inputs must need gradients.
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(model, case.run(model)), wanted)


def test_hidden_states():
    """transformers 5 shows what the layers return, 4 what the loop passes on; both begin with the
    embedding or its row, and end with the output."""
    model = plain("bert")
    CASES["bert"].connect(model)
    encoder = model.bert.encoder
    returned, taken = [], []
    for layer in encoder.layer:
        layer.register_forward_hook(
            lambda _m, args, out: (
                taken.append(args[0]), returned.append(out[0] if isinstance(out, tuple) else out)
            )[:0] or None
        )  # fmt: skip
    out = model.bert(ids(), output_hidden_states=True)
    states = out.hidden_states
    assert len(states) == L + 1
    assert torch.equal(states[-1], out.last_hidden_state)
    for k in range(1, L):
        assert torch.equal(states[k], returned[k - 1] if TRANSFORMERS == 5 else taken[k])
    embedding = model.bert.embeddings(ids())
    assert torch.equal(states[0], taken[0] if TRANSFORMERS == 5 else embedding)


def trainer(model, folder):
    pytest.importorskip("accelerate")
    rows = ids(24, 6)
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=20, per_device_train_batch_size=2, learning_rate=3e-3,
        gradient_accumulation_steps=2, save_steps=5, logging_steps=1, report_to=[], use_cpu=True,
        lr_scheduler_type="constant", disable_tqdm=True,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=data)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_trainer(name, tmp_path):
    """Accumulated gradients, 20 steps, and a run that goes on from a checkpoint in the middle."""
    config = CASES[name].make().config

    def fresh():
        torch.manual_seed(0)
        return connected_class(name)(config)

    whole = trainer(fresh(), tmp_path / "whole")
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    rest = trainer(fresh(), tmp_path / "rest")
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    other = dict(rest.model.named_parameters())
    for key, p in whole.model.named_parameters():
        torch.testing.assert_close(other[key], p, msg=key)
    # What it saved loads as a connected model.
    loaded = deepfast.connected(type(CASES[name].make()))
    loaded = loaded.from_pretrained(tmp_path / "whole" / "checkpoint-20")
    assert torch.equal(CASES[name].run(loaded), CASES[name].run(whole.model.eval()))
