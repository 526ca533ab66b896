"""Connected classes of Hugging Face transformers: loading, saving, adapting and training."""

import copy
import pickle

import pytest
import torch

import deepfast
from tests.attach.models import CASES, GATED, READS, D, L, perturbed

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


NAMES = ["bert", "modernbert", "bart", "t5", "llama", "vit"]


@pytest.mark.parametrize("name", NAMES)
def test_from_pretrained_of_a_plain_checkpoint(name, tmp_path, poison):
    """What the checkpoint lacks has its initial values. With DenseFormer's the outputs stay."""
    case, model = CASES[name], plain(name)
    model.save_pretrained(tmp_path)
    loaded = connected_class(name, connection="denseformer").from_pretrained(tmp_path)
    assert torch.equal(case.run(loaded), case.run(model))
    dlcl = connected_class(name).from_pretrained(tmp_path)
    for connection in case.connections(dlcl):
        fresh = deepfast.nn.DLCL(L, D, norm=case.norm)
        for key, value in fresh.state_dict().items():
            assert torch.equal(connection.state_dict()[key], value), key


NAMED = GATED | {"sublayers": (("ln_1", "attn"), ("ln_2", "mlp"))}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {"window": 2}) for name in NAMES), ("gpt2", GATED), ("gpt2", NAMED), ("t5", READS)],
)
def test_save_and_load(name, options, tmp_path, poison):
    """The settings are in the config, the names of sublayers too."""
    case = CASES[name]
    torch.manual_seed(0)
    cls = connected_class(name, **options)
    model = perturbed(cls(case.make().config)).eval()
    model.save_pretrained(tmp_path)
    for again in (cls, deepfast.connected(type(case.make()))):
        loaded = again.from_pretrained(tmp_path)
        assert torch.equal(case.run(loaded), case.run(model))
        assert [c.window for c in case.connections(loaded)] == [
            c.window for c in case.connections(model)
        ]
        assert isinstance(loaded, type(case.make()))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(case.run(twin), case.run(model))


def test_part_of_a_connection_is_missing(tmp_path, poison):
    model = perturbed(connected_class("bert")(CASES["bert"].make().config))
    state = model.state_dict()
    state.pop("bert.encoder.depth_connection.norm_bias")
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = type(model).from_pretrained(tmp_path).bert.encoder.depth_connection
    assert torch.equal(loaded.weight, model.bert.encoder.depth_connection.weight)
    assert not loaded.norm_bias.any()


def test_the_config(tmp_path):
    """It has the settings of a connection, but does not say how a pass runs."""
    case = CASES["bert"]
    config = case.make().config
    before = copy.deepcopy(config)
    model = connected_class("bert", recompute="layer+input", inplace=False)(config)
    # That of the caller stays.
    assert config.to_dict() == before.to_dict()
    model.save_pretrained(tmp_path)
    loaded = deepfast.connected(type(case.make())).from_pretrained(tmp_path)
    for one, wanted in (
        (model, ("layer+input", False)),
        (copy.deepcopy(model), ("layer+input", False)),
        (loaded, ("none", True)),
    ):
        settings = one.bert.encoder.layer.attachment.settings
        assert (settings.recompute, settings.inplace) == wanted
    assert torch.equal(case.run(loaded.eval()), case.run(model.eval()))
    with pytest.raises(ValueError, match=r"the config's depth connections .*, got"):
        connected_class("bert", window=2).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the config has no depth connections"):
        deepfast.connected(transformers.BertModel)(config)


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


def test_bfloat16_checkpoint_keeps_the_connection_in_float32(tmp_path):
    plain("bert").save_pretrained(tmp_path)
    model = connected_class("bert").from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.bert.encoder.depth_connection.weight.dtype == torch.float32
    assert CASES["bert"].run(model).dtype == torch.bfloat16
