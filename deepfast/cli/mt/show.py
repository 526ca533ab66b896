"""Shows what a model has learned of its depth.

Without TEXT: tables of the weights W of DLCL, of the mean weights of attention residuals, or of the
choice of layers of latent depth; with --output also a picture.

W says which layers each layer reads, and how much, as in Figure 5 of Wang et al. 2019. It is shown
as it is applied: masked and softmaxed if the model does so, and with several weights for a pair of
layers their mean over channels. Weights under the threshold, or under 5% of their row's largest,
are left out. In a row without any weight that reaches the threshold, only the 5% counts.

With --source K only one column of W is shown: the weight of y_K in the input of every layer above
it, as in Figure 5c. K = 0 is the embedding.

Attention residuals give each token its own weights. The output is their mean over the tokens of
--sample; in a decoder, over the model's own translations. Where each sublayer reads, rows count
sublayers.

For latent depth: the probability of each layer for each language, and whether it is kept.

With TEXT: a picture of how a fusion weighs the layers, hops by layers by words, for a recipe with
model.encoder_fusion or model.decoder_fusion. The decoder's weights are those along a translation:
the model's own, or a given one. A piece that begins a word has the vocabulary's mark ▁ in front."""

import argparse
import math
from pathlib import Path

import torch

from deepfast.cli.mt.decoding import say
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
OF_TEXT = ("language", "side", "translation")
"""Arguments that need TEXT."""
OF_WEIGHTS = ("threshold", "source", "sample")
"""Arguments that cannot go with it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", help="written by deepfast mt train")
    add("text", nargs="?", metavar="TEXT", help="a sentence to translate, for a fusion of layers")
    text = "a picture, .svg or .png; default with TEXT: attention.svg"
    add("--output", type=Path, metavar="FILE", help=text)
    text = "smallest weight of W to show, at least 0; default 0.1; 0 shows all"
    add("--threshold", type=float, metavar="X", help=text)
    text = "show the weights of this layer's output alone"
    add("--source", type=int, metavar="K", help=text)
    text = "source sentences, for attention residuals"
    add("--sample", type=Path, metavar="FILE", help=text)
    add("--language", help="put the tag of this language in front of TEXT")
    add("--side", choices=SIDES, help="default: the first side that has a fusion")
    add("--translation", help="for the decoder; default: the model's own")


def run(args: argparse.Namespace) -> int:
    wrong, expected = (OF_TEXT, "TEXT") if args.text is None else (OF_WEIGHTS, "no TEXT")
    for name in wrong:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name}: expected {expected} beside it")
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

    threshold = weight_picture.THRESHOLD if args.threshold is None else args.threshold
    if not 0 <= threshold < math.inf:
        raise ValueError(f"--threshold: expected a number of at least 0, got {threshold:g}")
    sides = weight_picture.weights_of(translator.model, threshold, _means(args, translator))
    choices = weight_picture.choices_of(translator.model)
    if not sides and not choices:
        raise ValueError(
            f"{args.checkpoint}: expected a model with DLCL, attention residuals or latent depth "
            "in the encoder or the decoder, or TEXT for a fusion, got none of them"
        )
    if args.source is None:
        weight_picture.show(sides, choices)
        if args.output is not None:
            weight_picture.draw(sides, choices, args.output)
        return
    deepest = max((len(side.matrix) - 1 for side in sides), default=-1)
    if not 0 <= args.source <= deepest:
        expected = f"a layer from 0 to {deepest}" if sides else "a model with weights of layers"
        raise ValueError(f"--source: expected {expected}, got {args.source}")
    sides = [side for side in sides if args.source < len(side.matrix)]
    weight_picture.show_source(sides, args.source)
    if args.output is not None:
        weight_picture.draw_source(sides, args.source, args.output)


def _means(args: argparse.Namespace, translator: Translator) -> dict | None:
    """The mean weights of the model's attention residuals over --sample; None without any."""
    from deepfast.measure.depth_attention import attention_residuals, mean_attention

    if bool(attention_residuals(translator.model)) != (args.sample is not None):
        raise ValueError(
            "--sample: expected source sentences for a model with attention residuals, and for no "
            f"other model, got {args.sample}"
        )
    if args.sample is None:
        return None
    lines = translator.prepare(read_lines(args.sample))
    return mean_attention(translator.model, translator.vocabulary, lines)


def _attention(args: argparse.Namespace, translator: Translator) -> None:
    """A picture of a fusion's weights at the words of a sentence."""
    from deepfast.measure.attention_picture import draw

    side = args.side or _fused_side(translator.model)
    if args.translation is not None and side != "decoder":
        raise ValueError("--translation: expected the decoder's fusion, got the encoder's")
    weights, words = layer_weights(args, translator, side)
    missing = draw(
        weights,
        words,
        args.output,
        title=f"{side}: weight of each layer",
        across=f"{'source' if side == 'encoder' else 'translation'} ({SPACE} begins a word)",
    )
    if missing:
        shown = "left to the viewer's fonts" if args.output.suffix == ".svg" else "shown as codes"
        say(args, f"no font here has {missing}: {shown}")


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
        if args.translation is None:
            (translation,) = translate_lines(model, vocabulary, [text], translator.decoding)
        else:
            (translation,) = translator.prepare_references([args.translation])
        words = ["<s>", *vocabulary.target.pieces(translation)]
        target = torch.tensor([[BOS, *vocabulary.target.encode(translation)]])
        weights = model.layer_attention(source_BS, target)
    if getattr(model.config, f"{side}_fusion") == "channel_attention":
        weights = weights.unflatten(1, (-1, model.config.dim)).mean(2)
    return weights, words
