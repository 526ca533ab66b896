"""Shows what a model has learned of its depth.

Without TEXT: tables of the weights W of DLCL, of the mean weights of attention residuals, or of the
choice of layers of latent depth; with --output also a picture.

W says which layers each layer reads, and how much, as in Figure 5 of Wang et al. 2019. It is shown
as it is applied: masked and softmaxed if the model does so, and with several weights for a pair of
layers their mean over channels. Weights under 10% of their row's largest are left out.

Attention residuals give each token its own weights. The output is their mean over the tokens of
--sample; in a decoder, over the model's own translations. Where each sublayer reads, rows count
sublayers.

For latent depth: the layers that each language keeps; the picture has the probability of each.

With TEXT: a picture of how a fusion weighs the layers, hops by layers by words, for a recipe with
model.encoder_fusion or model.decoder_fusion. The decoder's weights are those along the model's
translation. A piece that begins a word has the vocabulary's mark ▁ in front."""

import argparse
from pathlib import Path

import torch

from deepfast.cli.mt.decoding import warnings_said
from deepfast.cli.outputs import check_picture
from deepfast.files import require
from deepfast.mt.data.text import read_lines
from deepfast.mt.data.vocabulary import BOS, EOS, SPACE
from deepfast.mt.models.interface import SearchModel
from deepfast.mt.search import Translator, load_translator, translate_lines
from deepfast.nn.connections.fusion import WITH_ATTENTION

EXAMPLE = """deepfast mt show runs/phrases-dlcl30/average.pt --output weights.svg
  deepfast mt show runs/layer-fusion/best.pt "the old house" --output layers.svg"""
SIDES = ("encoder", "decoder")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", help="written by deepfast mt train")
    add("text", nargs="?", metavar="TEXT", help="a sentence to translate, for a fusion of layers")
    text = "a picture, .svg or .png; default with TEXT: attention.svg"
    add("--output", type=Path, metavar="FILE", help=text)
    text = "source sentences, for attention residuals"
    add("--sample", type=Path, metavar="FILE", help=text)
    add("--language", help="put the tag of this language in front of TEXT")
    add("--side", choices=SIDES, help="with TEXT; default: the first side that has a fusion")


def run(args: argparse.Namespace) -> int:
    if args.text is not None:
        require("matplotlib", "drawing")
        args.output = args.output or Path("attention.svg")
    check_picture("--output", args.output)
    translator = load_translator([args.checkpoint], "cpu")
    (_weights if args.text is None else _attention)(args, translator)
    if args.output is not None:
        print(f"drawn: {args.output}")
    return 0


def _weights(args: argparse.Namespace, translator: Translator) -> None:
    """Tables, and perhaps a picture, of W or of the choice of layers."""
    from deepfast.measure import weight_picture
    from deepfast.measure.depth_attention import attention_residuals, mean_attention

    model, means = translator.model, None
    if attention_residuals(model):
        if args.sample is None:
            raise ValueError(
                "--sample: expected source sentences, over which the weights of attention "
                "residuals are averaged, got none"
            )
        lines = translator.prepare(read_lines(args.sample))
        means = mean_attention(model, translator.vocabulary, lines)
    sides, choices = weight_picture.weights_of(model, means), weight_picture.choices_of(model)
    if not sides and not choices:
        raise ValueError(
            f"{args.checkpoint}: expected a model with DLCL, attention residuals or latent depth "
            "in the encoder or the decoder, or TEXT for a fusion, got none of them"
        )
    weight_picture.show(sides, choices)
    if args.output is not None:
        weight_picture.draw(sides, choices, args.output)


def _attention(args: argparse.Namespace, translator: Translator) -> None:
    """A picture of a fusion's weights at the words of a sentence."""
    from deepfast.measure.attention_picture import draw

    side = args.side or _fused_side(translator.model)
    weights, words = layer_weights(args, translator, side)
    with warnings_said(args):
        draw(
            weights,
            words,
            args.output,
            title=f"{side}: weight of each layer",
            across=f"{'source' if side == 'encoder' else 'translation'} ({SPACE} begins a word)",
        )


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
    args: argparse.Namespace, translator: Translator, side: str
) -> tuple[torch.Tensor, list[str]]:
    """(N, hops, L + 1) and the N words. With a weight for each channel: their mean in each hop."""
    model, vocabulary = translator.model, translator.vocabulary
    (text,) = translator.prepare([args.text], args.language)
    source = vocabulary.encode(text)
    if not source:
        raise ValueError("TEXT: expected words, got none")
    source_BS = torch.tensor([[*source, EOS]])
    if side == "encoder":
        words = [*vocabulary.pieces(text), "</s>"]
        weights = model.layer_attention(source_BS)
    else:
        (translation,) = translate_lines(model, vocabulary, [text], translator.decoding)
        words = ["<s>", *vocabulary.target.pieces(translation)]
        target = torch.tensor([[BOS, *vocabulary.target.encode(translation)]])
        weights = model.layer_attention(source_BS, target)
    if getattr(model.config, f"{side}_fusion") == "channel_attention":
        weights = weights.unflatten(1, (-1, model.config.dim)).mean(2)
    return weights, words
