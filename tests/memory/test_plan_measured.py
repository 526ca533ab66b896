"""What the planner predicts, against training steps that are run and counted."""

import random

import pytest
import torch

from deepfast.memory import POLICIES, LiveBytes, plan
from deepfast.mt.models import Transformer, TransformerConfig
from deepfast.nn import MultiheadAttention, Packing, TransformerEncoder
from deepfast.policies import ATTENTION_RESIDUALS, policies_of

LENGTH = 16
ADAM = 8


def close(predicted, measured):
    assert predicted == pytest.approx(measured, rel=0.05)


def autocast(dtype):
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")


def pad_attention(model):
    """Lets attention work on padded copies."""
    for module in model.modules():
        if isinstance(module, MultiheadAttention):
            module.backend = "sdpa"


def encoder_step(sizes, policies, dtype, *, padding=False, accumulate=1):
    """Measured peak of a step of an encoder, its parameters included."""
    layers, width, num_heads, ffn, tokens, options = sizes
    encoder = TransformerEncoder(layers, width, num_heads, ffn, **{"dropout": 0.1} | options)
    encoder.set_recompute(policies)
    if padding:
        pad_attention(encoder)
    shape = tokens // LENGTH, LENGTH
    packing = Packing.of(*shape, padding_mask(*shape) if padding else None)
    x = torch.randn(tokens - 2 * padding, width, requires_grad=True)
    with LiveBytes() as live:
        for _ in range(accumulate):
            with autocast(dtype):
                y = encoder.forward_packed(x * 1, packing)
            # The step makes the gradient of y, as a loss would.
            (2 * y).sum().backward()
            x.grad = None
            del y
    return live.peak + sum(4 * p.numel() for p in encoder.parameters())


def padding_mask(batch, length):
    """Two tokens of the second sentence."""
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[1, -2:] = True
    return mask


def drawn(seed, layers):
    """Sizes of an encoder: of a few layers wide ones, of many narrow ones."""
    draw = random.Random(seed)
    num_heads = draw.choice([1, 2, 4])
    width = num_heads * draw.choice([11, 12, 15] if layers > 10 else [12, 17, 32, 40])
    tokens = LENGTH * draw.choice([8, 13, 24])
    ffn = draw.choice([width, 2 * width + 1, 4 * width])
    options = {"connection": draw.choice(["dlcl", "residual", "latent"]),
               "norm": draw.choice(["pre", "post"]),
               "activation": draw.choice(["relu", "gelu"])}  # fmt: skip
    return (layers, width, num_heads, ffn, tokens, options), draw.choice(["float32", "bfloat16"])


def check_encoder(sizes, policies, dtype, **step):
    layers, width, num_heads, ffn, tokens, options = sizes
    kinds = dict(options)
    if "dlcl" in kinds:
        kinds["weight_type"] = kinds.pop("dlcl")["weight_type"]
    kinds["dropout"] = kinds.get("dropout", 0.1) > 0
    found = plan(
        budget="1TiB", num_layers=layers, dim=width, tokens=tokens, num_heads=num_heads,
        ffn_dim=ffn,
        vocab_size=0, decoder_layers=0, dtype=dtype, optimizer="none", device="cpu",
        recompute=policies, **kinds, **step,
    )  # fmt: skip
    close(found.peak, encoder_step(sizes, policies, dtype, **step))


KINDS = [{"connection": "dlcl"}, {"connection": "residual"}, {"connection": "latent"}]
KINDS += [
    {"connection": connection, "norm": "pre", "reads": reads}
    for connection in ATTENTION_RESIDUALS
    for reads in (1, 2)
]


# Other connections have no states to mix from.
@pytest.mark.only_if(lambda kind, policy: policy in policies_of(kind["connection"]))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("layers", [6, 18])
def test_every_policy_is_predicted_within_5_percent(layers, kind, policy):
    sizes, dtype = drawn(f"{layers} {kind} {policy}", layers)
    sizes[-1].update(kind)
    check_encoder(sizes, policy, dtype)


LATENT = {"connection": "latent", "norm": "pre"}
ENCODERS = {
    # Gradients need more memory than the activations of few tokens.
    "weights scaled by gates": ((8, 64, 2, 256, 64, LATENT), "ffn", "float32"),
    "weights scaled by gates, bfloat16": ((8, 64, 2, 256, 64, LATENT), "layer", "bfloat16"),
    "25 layers of latent depth": ((25, 128, 2, 512, 128, LATENT), "none", "float32"),
    "RMS norms": ((8, 16, 2, 24, 384, {"norm_type": "rms"}), "ffn", "float32"),
    "RMS norms, post-norm": (
        (8, 16, 2, 24, 384, {"connection": "residual", "norm": "post", "norm_type": "rms"}),
        "ffn", "float32"),
    # Wide heads and a narrow feed-forward block, so that keys and values have a large share.
    "one head of keys": ((8, 64, 4, 64, 384, {"num_kv_heads": 1}), "none", "float32"),
    "two heads of keys": ((8, 64, 4, 64, 384, {"num_kv_heads": 2}), "ffn", "float32"),
    "SwiGLU": ((8, 32, 2, 80, 384, {"activation": "swiglu"}), "none", "float32"),
    "SwiGLU again": ((8, 32, 2, 80, 384, {"activation": "swiglu"}), "ffn", "bfloat16"),
    "wide": ((6, 256, 4, 1024, 384, {}), "layer+input", "float32"),
    "two policies": ((10, 48, 4, 97, 208, {}), ["layer+input"] * 6 + ["ffn"] * 4, "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_predicted_within_5_percent(name):
    check_encoder(*ENCODERS[name])


@pytest.mark.parametrize(("policy", "connection"), [("none", "residual"), ("ffn", "dlcl")])
def test_padded_sentences_are_predicted_within_5_percent(policy, connection):
    """Attention works on padded copies, and its result is kept padded and packed."""
    sizes = 8, 64, 2, 256, 32 * LENGTH, {"connection": connection}
    check_encoder(sizes, policy, "float32", padding=True)


ATTENTION = {"connection": "attnres", "decoder_connection": "attnres"}
MODELS = {
    "none": {},
    "ffn, bfloat16": {"recompute": "ffn", "dtype": "bfloat16"},
    "ffn, post-norm": {"recompute": "ffn", "norm": "post"},
    "RMS norms": {"norm_type": "rms"},
    "history, bfloat16": {"recompute": "layer+input", "dtype": "bfloat16",
        "decoder_recompute": "layer"},
    "states, gelu": {"recompute": "layer", "activation": "gelu"},
    "two, and states": {"accumulate": 2, "recompute": "layer"},
    "dlcl on both sides": {"decoder_connection": "dlcl", "recompute": "layer+input"},
    "a long target": {"decoder_recompute": "ffn", "target": 3 * LENGTH},
    "two micro-batches": {"accumulate": 2, "recompute": "ffn"},
    "a vocabulary that outweighs the rest": {"vocab_size": 6000, "recompute": "layer"},
    "latent on both sides": {"connection": "latent", "decoder_connection": "latent"},
    "latent, ffn, bfloat16": {"connection": "latent", "decoder_connection": "latent",
                               "recompute": "ffn", "dtype": "bfloat16", "batch": 8},
    "attention residuals on both sides": ATTENTION | {"decoder_connection": "block_attnres"},
    "attention residuals, history, bfloat16": ATTENTION | {
        "connection": "block_attnres", "recompute": "layer+input", "dtype": "bfloat16"},
    "attention residuals, ffn, padding": ATTENTION | {"recompute": "ffn", "padding": True},
    "attention residuals, one read": ATTENTION | {"reads": 1, "recompute": "layer"},
    "one weight per channel": {"weight_type": "vector", "recompute": "ffn"},
    # The shared embedding has three gradients, which are added up at the end.
    "many words, few tokens": {"vocab_size": 9000, "batch": 4},
    "many words, few tokens, twice": {"vocab_size": 9000, "batch": 4, "accumulate": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_is_predicted_within_5_percent(name):
    check_model(**MODELS[name])


def check_model(**changes):
    case = {"recompute": "none", "dtype": "float32", "norm": "pre", "norm_type": "layer",
            "activation": "relu", "connection": "dlcl", "decoder_connection": "residual",
            "target": LENGTH, "accumulate": 1, "vocab_size": 300, "weight_type": "scalar",
            "batch": 24,
            "dim": 64, "num_heads": 2, "ffn_dim": 192, "num_layers": 5, "decoder_layers": 3,
            "dropout": 0.1,
            "padding": False, "reads": None} | changes  # fmt: skip
    dtype, batch = case["dtype"], case["batch"]
    decoder = case.get("decoder_recompute", case["recompute"])
    connections = case["connection"], case["decoder_connection"]
    dlcl = {"weight_type": case["weight_type"]} if "dlcl" in connections else {}
    model = Transformer(TransformerConfig(
        vocab_size=case["vocab_size"], dim=case["dim"], num_heads=case["num_heads"],
        ffn_dim=case["ffn_dim"], encoder_layers=case["num_layers"],
        decoder_layers=case["decoder_layers"],
        encoder_connection=connections[0], decoder_connection=connections[1], norm=case["norm"],
        norm_type=case["norm_type"], activation=case["activation"], dropout=case["dropout"],
        dlcl=dlcl,
        attnres_reads=case["reads"],
    ))  # fmt: skip
    model.encoder.set_recompute(case["recompute"])
    model.decoder.set_recompute(decoder)
    source = torch.randint(1, case["vocab_size"], (batch, LENGTH))
    target = torch.randint(1, case["vocab_size"], (batch, case["target"]))
    if case["padding"]:
        pad_attention(model)
        source[0, -1] = target[1, -1] = 0
    with LiveBytes() as live:
        for _ in range(case["accumulate"]):
            with autocast(dtype):
                loss, _ = model.loss(source, target, target, 0.1)
            loss.backward()
            del loss
    found = plan(
        budget="1TiB", tokens=batch * LENGTH, device="cpu", dropout=case["dropout"] > 0,
        decoder_recompute=decoder, target_tokens=batch * case["target"],
        **{key: case[key] for key in (
            "num_layers", "dim", "num_heads", "ffn_dim", "vocab_size", "decoder_layers", "dtype",
            "connection", "decoder_connection", "norm", "norm_type", "recompute", "activation",
            "accumulate", "padding", "reads")}, **dlcl,
    )  # fmt: skip
    count = sum(p.numel() for p in model.parameters())
    assert found.sizes.parameters == count
    close(found.peak, live.peak + (4 + ADAM) * count)


def policies_drawn(draw, count, connection):
    """One for all layers, two in a row, or any."""
    names = policies_of(connection)
    if count == 1 or draw.random() < 0.6:
        return draw.choice(names)
    if draw.random() < 0.3:
        return [draw.choice(names) for _ in range(count)]
    bottom, top = draw.sample(names, 2)
    lower = draw.randint(1, count - 1)
    return [bottom] * lower + [top] * (count - lower)


def test_sizes_at_random_are_predicted_within_5_percent(seed):
    """Encoders, and whole models with every third seed; `--drawn` tells how many."""
    draw = random.Random(f"sizes {seed}")
    layers = (1, 2, 3, draw.randint(4, 9))[seed % 4]
    num_heads = draw.choice([1, 2, 4, 8])
    width = num_heads * draw.choice(
        [d for d in (2, 4, 6, 10, 16, 32, 64) if 16 <= d * num_heads <= 128]
    )
    ffn = draw.choice([draw.randint(3, width), width, 2 * width + 1, 4 * width])
    batch = draw.choice([4, 5, 8, 13, 24])
    kinds = ["dlcl", "residual", "latent", *ATTENTION_RESIDUALS]
    connection, decoder = draw.choice(kinds), draw.choice(kinds)
    weight = draw.choice(["scalar", "vector"])
    kinds = {"connection": connection, "norm": draw.choice(["pre", "post"]),
             "activation": draw.choice(["relu", "gelu"]),
             "dropout": draw.choice([0.1, 0.1, 0.0])}  # fmt: skip
    if {connection, decoder} & set(ATTENTION_RESIDUALS):
        kinds |= {"norm": "pre", "reads": draw.choice([1, 2])}
    policies = policies_drawn(draw, layers, connection)
    step = {"padding": draw.random() < 0.3, "accumulate": draw.choice([1, 1, 2])}
    dtype = draw.choice(["float32", "bfloat16"])
    if seed % 3 < 2:
        options = kinds | ({"dlcl": {"weight_type": weight}} if connection == "dlcl" else {})
        if connection not in ATTENTION_RESIDUALS:
            options.pop("reads", None)
        sizes = layers, width, num_heads, ffn, batch * LENGTH, options
        check_encoder(sizes, policies, dtype, **step)
        return
    count = draw.randint(1, 4)
    check_model(
        num_layers=layers, dim=width, num_heads=num_heads, ffn_dim=ffn, batch=batch, dtype=dtype,
        weight_type=weight, recompute=policies,
        decoder_layers=count, decoder_recompute=policies_drawn(draw, count, decoder),
        decoder_connection=decoder, target=draw.choice([4, 16, 23, 40]),
        vocab_size=draw.choice([100, 300, 1000, 6000]), **kinds, **step,
    )  # fmt: skip


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames and "sizes_at_random" in metafunc.function.__name__:
        seeds = range(metafunc.config.getoption("drawn"))
        metafunc.parametrize(
            "seed",
            [pytest.param(n, marks=pytest.mark.exhaustive if n >= 12 else ()) for n in seeds],
        )
