"""Draws how a fusion weighs the layers: hops by layers by words.

The model's recipe must have model.encoder_fusion or model.decoder_fusion. The decoder's weights are
those along a translation: the model's own, or a given one. A piece that begins a word has the
vocabulary's mark ▁ in front."""

import argparse
import sys
from pathlib import Path

import torch

from deepfast.cli.outputs import check_picture
from deepfast.files import require
from deepfast.mt.data import Vocabulary
from deepfast.mt.data.vocabulary import BOS, EOS, SPACE
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search import load_translator, translate_lines
from deepfast.nn.connections.fusion import WITH_ATTENTION

EXAMPLE = 'deepfast mt show-attention model.pt "the old house" --output layers.svg'
SIDES = ("encoder", "decoder")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="written by deepfast mt train")
    parser.add_argument("text", metavar="TEXT", help="a sentence to translate")
    parser.add_argument("--language", help="put the tag of this language in front of TEXT")
    parser.add_argument("--side", choices=SIDES, help="default: the first side that has a fusion")
    parser.add_argument("--translation", help="for the decoder; default: the model's own")
    text = "a file, .svg or .png; default: %(default)s"
    parser.add_argument("--output", type=Path, default="attention.svg", help=text)


def run(args: argparse.Namespace) -> int:
    check_picture("--output", args.output)
    require("matplotlib", "drawing")
    translator = load_translator([args.checkpoint], "cpu")
    model, vocabulary = translator.model, translator.vocabulary
    if not isinstance(vocabulary, Vocabulary):
        raise ValueError(f"{args.checkpoint}: expected a vocabulary of subwords, got one of tokens")
    side = args.side or _fused_side(model)
    if args.translation is not None and side != "decoder":
        raise ValueError("--translation: expected the decoder's fusion, got the encoder's")
    (text,) = translator.prepare([args.text], args.language)
    translation = args.translation and translator.prepare([args.translation])[0]
    weights, words = layer_weights(model, vocabulary, side, text, translation)
    # matplotlib takes a second to import.
    from deepfast.measure.attention_picture import draw

    missing = draw(
        weights,
        words,
        args.output,
        title=f"{side}: weight of each layer",
        across=f"{'source' if side == 'encoder' else 'translation'} ({SPACE} begins a word)",
    )
    if missing:
        shown = "left to the viewer's fonts" if args.output.suffix == ".svg" else "shown as codes"
        print(f"deepfast mt show-attention: no font here has {missing}: {shown}", file=sys.stderr)
    print(args.output)
    return 0


def _fused_side(model: SearchModel) -> str:
    for side in SIDES:
        if getattr(model.config, f"{side}_fusion", None) in WITH_ATTENTION:
            return side
    raise ValueError(
        "expected a model with an encoder_fusion or a decoder_fusion of "
        f"{' or '.join(WITH_ATTENTION)}, got one without"
    )


@torch.inference_mode()
def layer_weights(
    model: SearchModel, vocabulary: Vocabulary, side: str, text: str, translation: str | None
) -> tuple[torch.Tensor, list[str]]:
    """(N, hops, L + 1) and the N words. With a weight for each channel: their mean in each hop."""
    source = vocabulary.encode(text)
    if not source:
        raise ValueError("TEXT: expected words, got none")
    source_BS = torch.tensor([[*source, EOS]])
    if side == "encoder":
        words = [*vocabulary.pieces(text), "</s>"]
        weights = model.layer_attention(source_BS)
    else:
        if translation is None:
            (translation,) = translate_lines(model, vocabulary, [text])
        words = ["<s>", *vocabulary.target.pieces(translation)]
        target = torch.tensor([[BOS, *vocabulary.target.encode(translation)]])
        weights = model.layer_attention(source_BS, target)
    if getattr(model.config, f"{side}_fusion") == "channel_attention":
        weights = weights.unflatten(1, (-1, model.config.dim)).mean(2)
    return weights, words
