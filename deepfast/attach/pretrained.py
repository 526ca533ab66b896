"""Connected classes of Hugging Face models: from_pretrained and save_pretrained work."""

import copy
import json
from typing import Any, ClassVar

import torch

from deepfast import checks
from deepfast.attach.parent import attachment_of, connect
from deepfast.attach.passes import CONNECT_POLICIES, NAME

OP = "deepfast.connected"
CONFIG = "depth_connections"
"""The attribute of a model's config that lists its connections, each by the arguments of
`connect`."""
_NOT_GIVEN = object()


def _given(**options) -> dict:
    return {name: value for name, value in options.items() if value is not None}


def connected(
    base: type,
    parent: str | None = None,
    layers: str | None = None,
    *,
    norm: Any = _NOT_GIVEN,
    connection: str | None = None,
    dim: int | None = None,
    recompute: str | None = None,
    inplace: bool | None = None,
    **options,
) -> type:
    """The class ``base`` with a depth connection, for models of Hugging Face transformers.

    ::

        Model = deepfast.connected(BertForMaskedLM, "bert.encoder", norm="post")
        model = Model.from_pretrained("bert-base-uncased")

    A checkpoint without the connection gives it its initial values. ``save_pretrained`` writes the
    connection's settings into the config, so that ``deepfast.connected(BertForMaskedLM)`` loads the
    checkpoint without repeating them. Connect a connected class again for a second parent, as an
    encoder and a decoder.

    Args:
        base: a class of models, such as BertForMaskedLM.
        parent: name of the submodule whose forward loops over the layers; None takes all settings
            from the config.
        layers, norm, connection, dim, options: see `connect`.
        recompute, inplace: see `connect`; of all connections of the class. The config does not have
            them. None: that of ``base``, or the default.

    Raises:
        TypeError, ValueError: for settings that do not fit; others when a model is built.
    """
    if not isinstance(base, type) or not hasattr(base, "from_pretrained"):
        raise TypeError(f"{OP}: expected a class of pretrained models, got {base!r}")
    checks.choice(OP, (*CONNECT_POLICIES, None), recompute=recompute)
    plain, settings, policies = getattr(base, "connected_parts", (base, (), {}))
    given = _given(layers=layers, connection=connection, dim=dim) | options
    if norm is not _NOT_GIVEN:
        given["norm"] = norm
    if parent is not None:
        checks.choice(OP, ("pre", "post", None), norm=given.get("norm", "not given"))
        if given.get("state_dtype") is torch.float32:
            # The default, and no value of a JSON file.
            del given["state_dtype"]
        # As a JSON file gives them back.
        settings = (*settings, json.loads(json.dumps({"parent": parent, **given})))
    elif given:
        raise TypeError(
            f"{OP}: {min(given)} needs parent, the name of the module to connect; without parent "
            "all settings are those of the config"
        )
    return _make(plain, settings, policies | _given(recompute=recompute, inplace=inplace))


def _make(base: type, *parts) -> type:
    # transformers looks at the names of classes, to choose the loss for example.
    copied = ("__doc__", "__module__", "__qualname__")
    body = {name: getattr(base, name) for name in copied} | {"connected_parts": (base, *parts)}
    return type(base.__name__, (_Connected, base), body)


class _Connected:
    """The part of a connected class that its base lacks."""

    connected_parts: ClassVar[tuple[type, tuple[dict, ...], dict]]
    """The base; the settings of the connections, none where the config has them; and the arguments
    of `connect` that say how a pass runs, which the config does not have."""

    def __init__(self, config, *args, **kwargs):
        _, connections, policies = self.connected_parts
        saved = getattr(config, CONFIG, None)
        wanted = [dict(s) for s in connections] or saved
        if not wanted:
            raise ValueError(
                f"{OP}: the config has no depth connections; say which, as in "
                "connected(BertForMaskedLM, 'bert.encoder', norm='post')"
            )
        if saved is not None and saved != wanted:
            raise ValueError(f"{OP}: expected the config's depth connections {saved}, got {wanted}")
        # The caller's config stays as it is.
        config = copy.deepcopy(config)
        setattr(config, CONFIG, wanted)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        strict = getattr(self, "_keep_in_fp32_modules_strict", None) or ()
        self._keep_in_fp32_modules_strict = {*strict, NAME}
        model: Any = self
        # Submodules may have copies of the config.
        configs = [m.config for m in model.modules() if hasattr(m, "config")]
        for settings in wanted:
            options = {name: value for name, value in settings.items() if name != "parent"}
            try:
                module = model.get_submodule(settings["parent"])
            except AttributeError as error:
                raise ValueError(
                    f"{OP}: parent must be the name of a submodule of {type(self).__name__}, got "
                    f"{settings['parent']!r} ({error})"
                ) from error
            connect(module, **policies, **options)
            attachment_of(module).handles.append(_Listed(configs, settings["parent"]))

    @torch.no_grad()
    def initialize_weights(self):
        """Initialises what a checkpoint does not have. transformers knows only its own modules."""
        super().initialize_weights()  # type: ignore[misc]
        for name, module in self.named_modules():  # type: ignore[attr-defined]
            if name.rpartition(".")[2] == NAME:
                parameters = list(module.parameters())
                loaded = [p for p in parameters if getattr(p, "_is_hf_initialized", False)]
                values = [p.clone() for p in loaded]
                if len(loaded) < len(parameters):
                    module.reset_parameters()
                for p, value in zip(loaded, values, strict=True):
                    p.copy_(value)

    def __reduce_ex__(self, protocol) -> Any:
        # The class has no name by which pickle finds it.
        return _empty, self.connected_parts, *super().__reduce_ex__(protocol)[2:]


class _Listed:
    """A connection in the configs of its model. `deepfast.disconnect` removes it as a handle."""

    def __init__(self, configs: list, parent: str):
        self.configs, self.parent = configs, parent

    def remove(self) -> None:
        for config in self.configs:
            settings = getattr(config, CONFIG, [])
            rest = [s for s in settings if s["parent"] != self.parent]
            if rest:
                setattr(config, CONFIG, rest)
            elif settings:
                delattr(config, CONFIG)


def _empty(*parts):
    """For pickle: an instance of the connected class, before its state is set."""
    cls: Any = _make(*parts)
    return cls.__new__(cls)
