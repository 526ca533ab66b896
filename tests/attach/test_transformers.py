"""Connected classes of Hugging Face transformers: loading, saving, adapting and training."""

import copy
import pickle

import pytest
import torch

import deepfast
from deepfast.attach.passes import NAME
from tests.attach.models import CASES, GATED, READS, D, L, perturbed

pytest.importorskip("transformers")


def plain(name):
    return perturbed(CASES[name].make()).eval()


def connected_class(name, **options):
    case = CASES[name]
    cls = type(case.make())
    for place in case.parents:
        path, _, layers = place.partition(":")
        cls = deepfast.connected(cls, path, layers, norm=case.norm, **options)
    return cls


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_from_pretrained_of_a_plain_checkpoint(name, tmp_path, poison):
    """What the checkpoint lacks has its initial values, in float32."""
    case, model = CASES[name], plain(name)
    model.save_pretrained(tmp_path)
    model, loaded = (
        cls.from_pretrained(tmp_path, dtype=torch.bfloat16)
        for cls in (type(model), connected_class(name))
    )
    assert case.run(loaded).dtype == torch.bfloat16
    fresh = deepfast.nn.DLCL(L, D, norm=case.norm).state_dict()
    for connection in case.connections(loaded):
        torch.testing.assert_close(connection.state_dict(), fresh, rtol=0, atol=0)
    case.disconnect(loaded)
    assert torch.equal(case.run(loaded), case.run(model))


NAMED = GATED | {"sublayers": (("ln_1", "attn"), ("ln_2", "mlp"))}


@pytest.mark.parametrize(("name", "options"), [
    ("bert", {"window": 2}), ("gpt2", NAMED), ("t5", READS),
])  # fmt: skip
def test_save_and_load(name, options, tmp_path, poison):
    """The settings are in the config, the names of sublayers too."""
    case = CASES[name]
    cls = connected_class(name, **options)
    model = perturbed(cls(case.make().config)).eval()
    model.save_pretrained(tmp_path)
    base, wanted = type(case.make()), case.run(model)
    loaded = [one.from_pretrained(tmp_path) for one in (cls, deepfast.connected(base))]
    for twin in (*loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(case.run(twin), wanted)
        assert isinstance(twin, base)
        assert {c.window for c in case.connections(twin)} == {options.get("window")}


def test_part_of_a_connection_is_missing(tmp_path, poison):
    model = perturbed(connected_class("bert")(CASES["bert"].make().config))
    state = model.state_dict()
    state.pop("bert.encoder.depth_connection.norm_bias")
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = type(model).from_pretrained(tmp_path).bert.encoder.depth_connection
    assert torch.equal(loaded.weight, model.bert.encoder.depth_connection.weight)
    assert not loaded.norm_bias.any()


def test_the_config(tmp_path):
    """It has the settings of a connection, but does not say how a pass runs. That of the caller
    stays. `disconnect` takes the settings out of it."""
    case = CASES["bart"]
    config, base = case.make().config, type(case.make())
    before = copy.deepcopy(config)
    model = connected_class("bart", recompute="layer+input", inplace=False)(config)
    assert config.to_dict() == before.to_dict()
    model.save_pretrained(tmp_path)
    loaded, twin = deepfast.connected(base).from_pretrained(tmp_path), copy.deepcopy(model)
    for one, way in ((model, ("layer+input", False)), (twin, ("layer+input", False)),
                     (loaded, ("none", True))):  # fmt: skip
        settings = one.model.encoder.layers.attachment.settings
        assert (settings.recompute, settings.inplace) == way
    with pytest.raises(ValueError, match=r"the config's depth connections .*, got"):
        connected_class("bart", window=2).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the config has no depth connections"):
        deepfast.connected(base)(config)
    for parent, _ in case.places(twin):
        left = twin.config.depth_connections
        deepfast.disconnect(parent)
    assert [s["parent"] for s in left] == ["model.decoder"]
    twin.save_pretrained(tmp_path)
    assert "depth_connections" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("options", [{"connection": "denseformer"}, GATED])
def test_lora(options, tmp_path):
    """PEFT trains a copy of the connection, saves it, and puts it in the connection's place."""
    peft = pytest.importorskip("peft")
    case, base = CASES["llama"], plain("llama")
    wanted = case.run(base)
    case.connect(base, **options)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[NAME])
    model = peft.get_peft_model(copy.deepcopy(base), config)
    torch.testing.assert_close(case.run(model), wanted)
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert any(NAME in n for n in learning)
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
    torch.testing.assert_close(case.run(loaded.merge_and_unload()), tuned)
