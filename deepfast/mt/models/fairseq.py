"""Checkpoints of the DLCL authors' code, and of fairseq's Transformer, as models of this package.

Wang et al. 2019 trained with fairseq of 2018. Such a file is a pickle of ``{"model": state dict,
"args": argparse.Namespace, ...}``. It differs from a checkpoint of this package in

    ids         <Lua heritage> (or <s>) 0, <pad> 1, </s> 2, <unk> 3. Here: pad 0, unk 1, none 2,
                eos 3. So the rows of embeddings move. Decoding begins with </s>.
    positions   count from the id of <pad> + 1 = 2 in a sentence
    norms       a layer has them in the order of its sublayers, in pre-norm and in post-norm. Here
                the first norm of a pre-norm layer belongs to the stack.
    history     ``weight`` (L+1, L+1, X) with X = 1, n or D. ``layer_norms`` have the number of
                their state; without a norm of the embedding they may also count from 0.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import struct
from typing import Any

import torch
from torch import Tensor

from deepfast.mt.models.transformer import Transformer
from deepfast.mt.models.transformer_config import SIDES, TransformerConfig

SPECIALS = (("<Lua heritage>", "<s>"), ("<pad>",), ("</s>",), ("<unk>",))
"""The possible names of the four special tokens, in the order of the file's ids."""

ROWS = (1, 3, 0, 2)
"""The ids in the file of this package's ids 0 to 3: pad, unk, none, eos."""

FIRST_POSITION = 2

# Unpickling bytes that are not a pickle raises these: any byte may look like an instruction.
NO_PICKLE = (pickle.UnpicklingError, struct.error, EOFError, LookupError, OverflowError,
             RuntimeError, TypeError, ValueError)  # fmt: skip

# Buffers that no model needs.
IGNORED = re.compile(r"(encoder|decoder)\.(version|embed_positions\._float_tensor)$")

# Our names and theirs. Inside a layer:
MAPS = {"attention.out": "self_attn.out_proj", "cross_attention.out": "encoder_attn.out_proj",
        "feed_forward.up": "fc1", "feed_forward.down": "fc2"}  # fmt: skip
ATTENTIONS = {"attention": "self_attn", "cross_attention": "encoder_attn"}
# The norms of a layer in the order of their numbers, and their names in later fairseq.
NORMS = {
    "encoder": {"attention_norm": "self_attn", "feed_forward_norm": "final"},
    "decoder": {
        "attention_norm": "self_attn",
        "cross_attention_norm": "encoder_attn",
        "feed_forward_norm": "final",
    },
}
EMBEDDINGS = {
    "embedding.weight": "encoder.embed_tokens.weight",
    "target_embedding.weight": "decoder.embed_tokens.weight",
    "output.weight": "decoder.embed_out",
}


def read_fairseq(path: str | os.PathLike[str], *, unsafe: bool = False) -> dict[str, Any]:
    """The content of a fairseq checkpoint, on the CPU.

    Args:
        path: a file of torch's old or new format.
        unsafe: unpickle any object, which runs code from the file.

    Raises:
        ValueError: the file does not exist, is of another kind, or holds objects that are refused.
    """
    try:
        # fairseq keeps its arguments in a Namespace, which holds plain values only.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=not unsafe)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    except NO_PICKLE as error:
        found = re.search(r"GLOBAL ([\w.]+) was|global[: ]+`?([\w.]+)`? was", str(error))
        if found and not unsafe:
            name = found[1] or found[2]
            raise ValueError(
                f"{path}: expected tensors and plain values, got an object of {name}; --unsafe "
                "loads it, which runs code from the file: use it only for files you trust"
            ) from error
        raise ValueError(f"{path}: expected a fairseq checkpoint, got another file") from error
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected objects of packages that are installed here, got others ({error})"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(f"{path}: expected a fairseq checkpoint with the key 'model', got none")
    if not isinstance(content.get("args"), argparse.Namespace):
        raise ValueError(
            f"{path}: expected the arguments of training under the key 'args', got "
            f"{type(content.get('args')).__name__}"
        )
    return content


def layout(tokens: list[str], rows: int, name: str) -> tuple[list[str], str]:
    """A dictionary's tokens without the four special ones, and the layout in words.

    Args:
        tokens: those of the dictionary file.
        rows: the number of rows of the embedding.
        name: the file's name, for errors.

    Raises:
        ValueError: no known layout has this number of tokens for this embedding.
    """
    count = len(SPECIALS)
    if rows == len(tokens) + count:
        return tokens, f"{count} special ids, then the {len(tokens)} tokens of {name}"
    begins = all(t in names for t, names in zip(tokens, SPECIALS, strict=False))
    if rows == len(tokens) >= count and begins:
        left = len(tokens) - count
        return tokens[count:], f"{count} special ids and {left} tokens, all of them in {name}"
    raise ValueError(
        f"{name}: expected {rows - count} tokens for an embedding of {rows} rows, of which {count} "
        f"are special ({', '.join(names[0] for names in SPECIALS)}), got {len(tokens)}"
    )


def _unlike(expected: str, got: object) -> ValueError:
    return ValueError(f"fairseq checkpoint: expected {expected}, got {got}")


class _Weights:
    """A state dict that knows which of its weights were read."""

    def __init__(self, weights: dict[str, Tensor]):
        self.all = {name: w for name, w in weights.items() if not IGNORED.match(name)}
        self.unread = dict.fromkeys(self.all)

    def __contains__(self, name: str) -> bool:
        return name in self.all

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A weight of that shape, in fp32 (training in fp16 saves fp16)."""
        if name not in self.all:
            raise _unlike(f"a weight {name}", "none")
        self.unread.pop(name, None)
        weight = self.all[name]
        if shape is not None and tuple(weight.shape) != shape:
            raise _unlike(f"{name} {shape}", tuple(weight.shape))
        return weight.float()

    def indices(self, pattern: str) -> list[int]:
        """The numbers that the first group of ``pattern`` matches, ascending."""
        found = (re.match(pattern, name) for name in self.all)
        return sorted({int(match[1]) for match in found if match})


def convert(content: dict[str, Any]) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """The config and state dict of a `Transformer` that computes what the checkpoint's model did.

    Args:
        content: what `read_fairseq` returned.

    Raises:
        ValueError: the model has parts that this package does not have; the error names the first.
    """
    weights = _Weights(content["model"])
    config = _config(content["args"], weights)
    with torch.device("meta"):
        model = Transformer(config)
    state = {
        name: _weight(weights, config, name, tuple(weight.shape))
        for name, weight in model.state_dict().items()
    }
    if config.share_embeddings == "all":
        # The decoder's embedding is the encoder's.
        weights.unread.pop("decoder.embed_tokens.weight")
    if weights.unread:
        raise _unlike("the parts of a Transformer with DLCL", f"{next(iter(weights.unread))} too")
    return config, state


def _config(args: argparse.Namespace, weights: _Weights) -> TransformerConfig:
    for name, usual in (("encoder_learned_pos", False), ("decoder_learned_pos", False),
                        ("no_token_positional_embeddings", False), ("no_scale_embedding", False),
                        ("activation_fn", "relu")):  # fmt: skip
        if getattr(args, name, usual) != usual:
            raise _unlike(f"{name} {usual}", getattr(args, name))
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        if name not in weights:
            raise _unlike(name, "none")
    source, target = (weights.all[f"{side}.embed_tokens.weight"] for side in SIDES)
    share = "decoder"
    if "decoder.embed_out" in weights:
        share = "none"
    elif source.shape == target.shape and torch.equal(source, target):
        share = "all"
    encoder, decoder = (_side(args, weights, side, source.shape[1]) for side in SIDES)
    for name, value in encoder.items():
        other = decoder[name]
        # A side without DLCL has no options of it.
        if value != other and (name != "dlcl" or None not in (value, other)):
            what = "DLCL alike" if name == "dlcl" else f"the same {name}"
            got = f"{value} in the encoder and {other} in the decoder"
            raise _unlike(f"{what} on both sides", got)
    dlcl = [side["dlcl"] for side in (encoder, decoder)]
    connections = ["residual" if options is None else "dlcl" for options in dlcl]
    layers = [len(weights.indices(rf"{side}\.layers\.(\d+)\.")) for side in SIDES]
    return TransformerConfig(
        vocab_size=source.shape[0],
        target_vocab_size=None if share == "all" else target.shape[0],
        share_embeddings=share,
        first_position=FIRST_POSITION,
        padding_idx=0,
        dim=source.shape[1],
        num_heads=encoder["attention_heads"],
        ffn_dim=encoder["ffn_embed_dim"],
        encoder_layers=layers[0],
        decoder_layers=layers[1],
        encoder_connection=connections[0],
        decoder_connection=connections[1],
        norm="pre" if encoder["normalize_before"] else "post",
        dropout=getattr(args, "dropout", 0.1),
        attention_dropout=getattr(args, "attention_dropout", 0.0),
        activation_dropout=getattr(args, "relu_dropout", 0.0),
        dlcl=dlcl[0] or dlcl[1] or {},
    )


def _side(args: argparse.Namespace, weights: _Weights, side: str, dim: int) -> dict[str, Any]:
    """What both sides must share: some arguments, and the options of DLCL, None without it."""
    found: dict[str, Any] = {}
    for name in ("attention_heads", "ffn_embed_dim", "normalize_before"):
        if not hasattr(args, f"{side}_{name}"):
            raise _unlike(f"args.{side}_{name}", "none")
        found[name] = getattr(args, f"{side}_{name}")
    has_weight = f"{side}.history.weight" in weights
    known = (None, "learnable_dense", "learnable_dense_nonorm")
    kind = getattr(args, f"{side}_history_type", known[has_weight])
    if kind not in known or has_weight != (kind is not None):
        raise _unlike(
            f"{side}_history_type learnable_dense, learnable_dense_nonorm or none",
            f"{kind} and {'' if has_weight else 'no '}{side}.history.weight",
        )
    if not has_weight:
        return found | {"dlcl": None}
    shape = weights.all[f"{side}.history.weight"].shape
    options: dict[str, Any] = {}
    per_pair = shape[2] if len(shape) == 3 else 1
    if per_pair == dim:
        options["weight_type"] = "vector"
    elif per_pair > 1:
        options |= {"weight_type": "group", "groups": per_pair}
    norms = weights.indices(rf"{side}\.history\.layer_norms\.(\d+)\.")
    if not norms:
        options["norm"] = None
    elif len(norms) == shape[0]:
        if not found["normalize_before"]:
            # In post-norm their code normalises the embedding twice, when it is stored and when it
            # is read. No formula of the paper does.
            raise _unlike(
                "a normalised embedding only in pre-norm",
                f"{side}.history.layer_norms.0 in post-norm",
            )
        options["normalize_embedding"] = True
    return found | {"dlcl": options}


def _weight(
    weights: _Weights, config: TransformerConfig, name: str, shape: tuple[int, ...]
) -> Tensor:
    """The weight of our model that has this name and shape."""
    if name in EMBEDDINGS:
        table = weights.read(EMBEDDINGS[name], shape)
        return torch.cat((table[list(ROWS)], table[len(ROWS) :]))
    side, _, inside = name.partition(".")
    inside, _, part = inside.rpartition(".")
    if inside == "connection.dlcl":
        return _history(weights, side, part, shape)
    kind, number, *names = inside.removeprefix("connection.").split(".")
    if kind == "norms":
        # The stack's: the first norm of each pre-norm layer, and the final one.
        if int(number) == getattr(config, f"{side}_layers"):
            return weights.read(f"{side}.layer_norm.{part}", shape)
        names = ["attention_norm"]
    ours, theirs = ".".join(names), f"{side}.layers.{number}"
    if ours in MAPS:
        return weights.read(f"{theirs}.{MAPS[ours]}.{part}", shape)
    if ours in NORMS[side]:
        place = f"{theirs}.layer_norms.{list(NORMS[side]).index(ours)}.{part}"
        if place not in weights:
            place = f"{theirs}.{NORMS[side][ours]}_layer_norm.{part}"
        return weights.read(place, shape)
    # The maps to query, key and value.
    theirs, d = f"{theirs}.{ATTENTIONS[names[0]]}", config.dim
    if f"{theirs}.q_proj.{part}" in weights:
        each = [weights.read(f"{theirs}.{n}_proj.{part}", (d, *shape[1:])) for n in "qkv"]
    else:
        each = list(weights.read(f"{theirs}.in_proj_{part}", (3 * d, *shape[1:])).chunk(3))
    chosen = {"query": each[:1], "key_value": each[1:], "query_key_value": each}
    return torch.cat(chosen[names[1]])


def _history(weights: _Weights, side: str, part: str, shape: tuple[int, ...]) -> Tensor:
    """DLCL's ``weight``, or its table ``norm_weight`` or ``norm_bias``."""
    if part == "weight":
        weight, rows = weights.read(f"{side}.history.weight").clone(), shape[0]
        if weight.shape[-1] == 1 and weight.dim() == 3:
            weight = weight.squeeze(-1)
        if tuple(weight.shape) != shape:
            raise _unlike(f"{side}.history.weight {shape}", tuple(weight.shape))
        # Nothing reads the part above the diagonal; it may hold anything.
        weight[torch.ones(rows, rows, dtype=torch.bool).triu(1)] = 0
        return weight
    rows, d = shape
    norms = weights.indices(rf"{side}\.history\.layer_norms\.(\d+)\.")
    # Without a norm of the embedding their numbers begin at 1 or at 0.
    first = rows - len(norms)
    if norms != list(range(norms[0], norms[0] + len(norms))) or first not in (0, 1):
        raise _unlike(f"{rows - 1} or {rows} norms in {side}.history", f"numbers {norms}")
    part = part.removeprefix("norm_")
    table = torch.ones(shape) if part == "weight" else torch.zeros(shape)
    for k, number in enumerate(norms, first):
        table[k] = weights.read(f"{side}.history.layer_norms.{number}.{part}", (d,))
    return table
