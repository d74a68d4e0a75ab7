"""The layers of a decoder of transformers one by one, for pipelines: whatever the model computes before, between and after them is
its own code, which runs with stand-ins in the layers' places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hpctrain.api import UsageError, children_of, forked_random_state

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a layer, without and with names."""
_OF_THE_SHAPE = {"attention_mask", "position_ids", "position_embeddings", "cache_position", "causal_mask"}
"""Tensors that a layer gets besides the hidden state, and that follow from its shape alone."""


class _DoneError(Exception):
    """Ends a forward whose last stand-in has seen its inputs."""


class _StandIn(nn.Module):
    """A place of a layer, or of an embedding that lies on another rank."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self._call(*inputs, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a model may ask its layers for their kind
            if (of := self.__dict__.get("like")) is not None:
                return getattr(of, name)
            raise


@dataclass
class Decoder:
    """A model of transformers whose layers follow one another in one list."""

    model: PreTrainedModel
    inner: nn.Module
    """The part of `model` that holds the list, without the head."""
    place: str
    """The list's name in `inner`."""

    @staticmethod
    def of(module: nn.Module) -> Decoder | None:
        """The decoder in `module`; None where layers lie in several lists, or none does."""
        model = next((one for one in module.modules() if isinstance(one, PreTrainedModel)), None)
        if model is None:
            return None
        inner: Any = getattr(model, model.base_model_prefix, None)
        if not isinstance(inner, nn.Module) or inner is model:
            return None
        lists = [
            (owner, name, one) for owner in model.modules() for name, one in owner.named_children() if _is_list(one)
        ]
        if len(lists) != 1 or lists[0][0] is not inner:
            return None
        return Decoder(model, inner, lists[0][1])

    def layers(self) -> list[nn.Module | None]:
        """The layers; None in the places of those that lie on other ranks."""
        listed = getattr(self.inner, self.place)
        return list(children_of(listed).values())

    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules with parameters before the layers and behind them."""
        children = [(name, one) for name, one in self.inner.named_children()]
        at = [name for name, _ in children].index(self.place)
        before, after = [one for _, one in children[:at]], [one for _, one in children[at + 1 :]]
        after += [one for one in self.model.children() if one is not self.inner]
        return [one for one in before if _has_parameters(one)], [one for one in after if _has_parameters(one)]

    def embedded(self, **inputs: Any) -> Tensor:
        """The input of the first layer, (batch, seq, hidden)."""
        return self._inputs(1, inputs)[0][0][0]  # type: ignore[no-any-return]

    def others(self, hidden: Tensor) -> list[Arguments]:
        """The other arguments of each layer, such as masks and rotary embeddings, for a hidden state of this shape.

        Raises UsageError for a model whose layers get more than that from one another or from the tokens.
        """
        with torch.no_grad(), forked_random_state(hidden.device):
            seen = self._inputs(len(self.layers()), {"inputs_embeds": torch.zeros_like(hidden)})
        for args, keywords in seen:
            unknown = [name for name, one in keywords.items() if isinstance(one, Tensor) and name not in _OF_THE_SHAPE]
            if unknown:
                raise self._unfit(f"a layer gets {unknown[0]}, which depends on the tokens")
            if any(one is not None and not isinstance(one, (Tensor, tuple, bool)) for one in args[1:]):
                raise self._unfit("a layer gets arguments of another kind than masks and embeddings of positions")
        return [(args[1:], keywords) for args, keywords in seen]

    def refuse_uncut(self) -> None:
        """Raises UsageError for a model whose layers can't run one by one, as far as one without values shows."""
        size = self.model.config.get_text_config().hidden_size
        for device in ("meta", "cpu"):  # where parameters lie, and where tables of positions do
            hidden = torch.zeros(1, 4, size, device=device)
            try:
                for layer, (others, named) in zip(self.layers(), self.others(hidden), strict=True):
                    if (
                        layer is not None
                        and device == "meta"
                        and not isinstance(layer(hidden, *others, **named), Tensor)
                    ):
                        raise self._unfit("a layer gives more than its hidden state")
            except UsageError:
                raise
            except (TypeError, ValueError) as error:
                raise self._unfit(f"its layers don't run one by one ({error})") from error
            except Exception:  # what has no values can't be computed everywhere
                continue

    def _unfit(self, why: str) -> UsageError:
        return UsageError(
            f"[parallelism] pipeline: a {type(self.model).__name__} can't be cut: {why}; use another axis"
        )

    def outputs(self, hidden: Tensor) -> Any:
        """The model's outputs after its last layer gave `hidden`, (batch, seq, hidden)."""
        with self._instead([_StandIn(lambda *inputs, **keywords: hidden)], hidden):
            return self.model(inputs_embeds=torch.zeros_like(hidden), use_cache=False)

    def _inputs(self, count: int, inputs: dict[str, Any]) -> list[Arguments]:
        """The arguments of the first `count` layers."""
        seen: list[Arguments] = []

        latest: list[Tensor] = []

        def see(*args: Any, **keywords: Any) -> Any:
            if not args or (latest and args[0] is not latest[0]):
                raise self._unfit("something is computed between its layers")
            seen.append((args, keywords))
            if len(seen) == count:
                raise _DoneError
            latest[:] = [args[0].clone()]
            return latest[0]

        with self._instead([_StandIn(see) for _ in range(count)], inputs.get("inputs_embeds")), suppress(_DoneError):
            self.inner(**inputs, use_cache=False)
        if len(seen) < count:
            raise self._unfit(f"its forward calls {len(seen)} of its {len(self.layers())} layers")
        return seen

    @contextmanager
    def _instead(self, stand_ins: list[_StandIn], hidden: Tensor | None) -> Iterator[None]:
        """The model with stand-ins for its layers, and with zeros, like `hidden`, for what embeddings on other ranks would add."""
        listed = getattr(self.inner, self.place)
        for stand_in, layer in zip(stand_ins, self.layers(), strict=False):
            stand_in.__dict__["like"] = layer
        absent = [name for name, one in children_of(self.inner).items() if one is None]
        setattr(self.inner, self.place, nn.ModuleList(stand_ins))
        zeros = None if hidden is None else hidden.new_zeros(())
        for name in absent if zeros is not None else ():
            setattr(self.inner, name, _StandIn(lambda *inputs, **keywords: zeros))
        try:
            yield
        finally:
            setattr(self.inner, self.place, listed)
            for name in absent:
                setattr(self.inner, name, None)


def _is_list(module: nn.Module | None) -> bool:
    return isinstance(module, nn.ModuleList) and any(
        isinstance(one, GradientCheckpointingLayer) for one in children_of(module).values()
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def let_run_alone(decoder: Decoder) -> None:
    """Let each layer be called with a hidden state alone."""
    latest: dict[Any, list[Arguments]] = {}
    for number, layer in enumerate(decoder.layers()):
        assert layer is not None
        layer.register_forward_pre_hook(Alone(decoder, number, latest), with_kwargs=True)


class Alone:
    """A forward pre-hook of a layer: called with a hidden state alone, it gets the other arguments that the model would give it."""

    def __init__(self, decoder: Decoder, number: int, latest: dict[Any, list[Arguments]]) -> None:
        """latest: of all layers, the arguments for the latest shape."""
        self._decoder, self._number, self._latest = decoder, number, latest

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return self  # a copy of a layer is no reason to copy the model

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if keywords or len(args) != 1:
            return None  # called by the model itself
        hidden: Tensor = args[0]
        kind = tuple(hidden.shape), hidden.dtype, hidden.device
        if kind not in self._latest:
            self._latest.clear()
            self._latest[kind] = self._decoder.others(hidden)
        others, named = self._latest[kind][self._number]
        return (hidden, *others), named
