"""Which tensor of an update is not finite first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import signature
from types import SimpleNamespace, TracebackType
from typing import Any

from torch import Tensor, nn

from reference.update import TrainState

# The others are left out: the model looks whether they are the reference's own.
OPERATORS = ("rms_norm", "rope", "attention", "swiglu", "linear", "token_nll")


class FirstNotFinite:
    """While it is entered, looks at every tensor of an update in the order in which it is made.

    These are parameters and moments before; the outputs of operators and modules; in the order of
    the backward pass, the gradients of what operators were given and of the parameters; parameters
    and moments after. `found` then says which was not finite first, or is None. What is computed
    does not change, but linear layers are called one by one: a stack's own projections and
    gated_linear are not.

    training: what is updated. stack: the roles that its model was built with, which are watched in
    this object itself.
    """

    def __init__(self, training: TrainState, stack: SimpleNamespace) -> None:
        self.found: str | None = None
        self._training, self._stack = training, stack
        self._roles = {name: getattr(stack, name) for name in OPERATORS}
        self._inside: list[str] = []  # names of the modules whose forward runs
        self._num_forwards = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> FirstNotFinite:
        self._look_at_the_state("before the update")
        for name, role in self._roles.items():
            setattr(self._stack, name, self._watched(name, role))
        for name, module in self._training.model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name)))
            self._hooks.append(module.register_forward_hook(self._leaving(name)))
        for name, parameter in self._training.model.named_parameters():
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(self._gradient_of(name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        for name, role in self._roles.items():
            setattr(self._stack, name, role)
        if error is None:
            self._look_at_the_state("after the update")

    def _look_at(self, what: str, tensor: Tensor) -> None:
        if self.found or not tensor.is_floating_point():
            return
        wrong = ~tensor.detach().isfinite()
        if bool(wrong.any()):
            first = [int(index) for index in wrong.nonzero()[0]]
            self.found = (
                f"{what}: {int(wrong.sum())} of {tensor.numel()} elements, the first at {first} is "
                f"{float(tensor.detach()[tuple(first)])}"
            )

    def _look_at_the_state(self, when: str) -> None:
        names = {p: name for name, p in self._training.model.named_parameters()}
        for parameter, name in names.items():
            self._look_at(f"parameter {name} {when}", parameter)
        for parameter, adam in self._training.optimizer_state.items():
            for moment in ("first_moment", "second_moment"):
                self._look_at(f"{moment} of {names[parameter]} {when}", getattr(adam, moment))

    def _look_at_output(self, what: str, output: Any) -> None:
        for tensor in _tensors(output):
            self._look_at(f"microbatch {self._num_forwards}, output of {what}", tensor)

    def _watched(self, name: str, role: Callable[..., Any]) -> Callable[..., Any]:
        names = tuple(signature(role).parameters)

        @wraps(role)
        def watched(*arguments: Any) -> Any:
            what = f"{name} in {self._inside[-1] if self._inside else 'the loss'}"
            for argument, tensor in zip(names, arguments, strict=False):
                if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                    place = f"microbatch {self._num_forwards}, gradient of {argument} of {what}"
                    tensor.register_hook(partial(self._look_at, place))  # type: ignore[no-untyped-call]
            output = role(*arguments)
            self._look_at_output(what, output)
            return output

        return watched

    def _entering(self, name: str) -> Callable[..., None]:
        def entering(module: nn.Module, inputs: Any) -> None:
            self._num_forwards += not name
            self._inside.append(name or "the model")

        return entering

    def _leaving(self, name: str) -> Callable[..., None]:
        def leaving(module: nn.Module, inputs: Any, output: Any) -> None:
            self._inside.pop()
            self._look_at_output(name or "the model", output)

        return leaving

    def _gradient_of(self, name: str) -> Callable[[Tensor], None]:
        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is not None:
                what = f"microbatch {self._num_forwards}, gradient of the parameter {name}"
                self._look_at(what, parameter.grad)

        return accumulated


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple):
        for each in output:
            yield from _tensors(each)
