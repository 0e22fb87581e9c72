"""Class registries: a class is found by the name that its config carries.
Their main use: proposal methods, which say how many tokens to draft and how to verify them (greedy, sampling,
static tree, dynamic tree)."""

import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from .files import NotSupported
from .options import MOST_DRAFTED, shown

_Class = TypeVar("_Class")


def same_definition(a: Any, b: Any) -> bool:
    "Whether one class or function is the other, run again or exported."
    modules = {a.__module__, b.__module__}
    return a.__qualname__ == b.__qualname__ and (len(modules) == 1 or "__main__" in modules)


class ClassRegistryMixin:
    "A base class that keeps a table `name -> class` of those that registered with it."

    registry: ClassVar[dict[str, type]]  # of one base class

    @classmethod
    def register(cls, name: str | None = None) -> Callable[[type[_Class]], type[_Class]]:
        """Decorator: enter a class in this base's table, under the word that configs carry; None: the class's own name.
        Errors: ValueError for a name in use, or one that is no string."""
        if name is not None and not isinstance(name, str):
            raise ValueError(f"register({name!r}): the name is a string, or left out")
        return lambda klass: cls.register_decorator(klass, name)

    @classmethod
    def register_decorator(cls, klass: type[_Class], name: str | None = None) -> type[_Class]:  # `klass`
        """Enter `klass` as `name`, as `register` does. The same class (by its qualified name) may come again, as
        when a notebook cell is run twice; where both a notebook and the module exported from it
        define it, the module's is registered. Errors: TypeError for what is no class."""
        if not isinstance(klass, type):
            raise TypeError(f"{cls.__name__}: register decorates classes, and {klass!r} is none")
        name = name or klass.__name__
        known = cls.registry.get(name, klass)
        if not same_definition(known, klass):
            raise ValueError(
                f"{cls.__name__}: the name {name!r} is taken by {known.__module__}.{known.__qualname__}, so "
                f"{klass.__module__}.{klass.__qualname__} cannot have it. Register it under another name."
            )
        known_is_exported = klass.__module__ == "__main__" != known.__module__
        cls.registry[name] = known if known_is_exported else klass
        return klass

    registry_auto_discovery: ClassVar[bool] = False  # import `auto_package` before a look
    auto_package: ClassVar[str | tuple[str, ...] | None] = None  # that register classes

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if ClassRegistryMixin in cls.__bases__:
            cls.registry = {}

    @classmethod
    def registered_classes(cls) -> dict[str, type]:  # name -> class, in the order of registration
        "What has registered so far, and what the discovered packages register."
        if cls.registry_auto_discovery:
            cls.auto_populate_registry()
        return dict(cls.registry)

    @classmethod
    def auto_populate_registry(cls) -> None:
        """Import every module of `auto_package`, so that each registers its classes. Errors:
        ImportError of a module that cannot be imported."""
        packages = cls.auto_package or ()
        for name in (packages,) if isinstance(packages, str) else packages:
            package = importlib.import_module(name)
            folders = getattr(package, "__path__", [])
            for module in pkgutil.walk_packages(folders, f"{name}."):
                importlib.import_module(module.name)

    @classmethod
    def registered_class(cls, name: str) -> type:
        "The class that registered as `name`. Errors: ValueError with the known names."
        if name not in cls.registry:
            raise ValueError(
                f"{cls.__name__}: {name!r} is not registered. Known: {', '.join(sorted(cls.registry)) or 'none'}. If "
                "it is yours, import the module that registers it first."
            )
        return cls.registry[name]


def explain(error: ValidationError, *where: str) -> str:  # one line
    "What is wrong, in which field (`where`: names before the field's), and what was given there."

    def one(e):
        place = ".".join(map(str, (*where, *e["loc"])))
        if e["type"] == "value_error":  # a rule of ours, which names the field and the value
            problem = str(e["ctx"]["error"])
            joint = "." if re.match(r"[\w.]+=", problem) else ": "
            return f"{place}{joint}{problem}" if place else problem
        if e["type"] == "rule":
            return e["msg"]
        if e["type"] in ("missing", "union_tag_not_found"):
            tag = e.get("ctx", {}).get("discriminator", "").strip("'")
            return f"{'.'.join(filter(None, (place, tag)))}=(missing): field required"
        return f"{place}={shown(e['input'])}: {e['msg'][0].lower()}{e['msg'][1:]}"

    return "; ".join(map(one, error.errors()))


class FieldError(ValidationError):
    "Pydantic's error, a ValueError, in one line: field, value, problem."

    @classmethod
    def of(cls, problem: str) -> "FieldError":
        "An error of a rule between fields, which the problem names."
        rule = PydanticCustomError("rule", "{problem}", {"problem": problem})
        return cls.from_exception_data("config", [InitErrorDetails(type=rule, input=None)])

    def __str__(self):
        return explain(self)

    __repr__ = __str__


def holds_numbers(hint: Any) -> bool:
    "Whether a type is one of numbers, and not of truth values, which Python takes for 0 and 1."

    def kinds(hint):
        inner = get_args(hint)
        return set().union(*map(kinds, inner)) if inner else {hint}

    return bool({int, float} & kinds(hint)) and bool not in kinds(hint)


class ReloadableBaseModel(BaseModel):
    """A pydantic model whose schema can be compiled again after new classes have registered.
    Errors: FieldError naming the field and its value (NotSupported where a rule raised that);
    a truth value is no number, and infinity neither."""

    model_config = ConfigDict(allow_inf_nan=False)

    def __init__(self, /, **fields):
        try:
            super().__init__(**fields)
        except ValidationError as e:
            causes = [error.get("ctx", {}).get("error") for error in e.errors()]
            if any(isinstance(cause, NotSupported) for cause in causes):
                raise NotSupported(explain(e)) from None
            lines: list[Any] = [  # without what is in the message
                {n: v for n, v in error.items() if n not in ("msg", "url")} for error in e.errors()
            ]
            raise FieldError.from_exception_data(e.title, lines) from None

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, fields):
        for name, value in fields.items() if isinstance(fields, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field and holds_numbers(field.annotation):
                raise ValueError(f"{name}={value}: is a truth value, and must be a number")
        return fields

    @classmethod
    def reload_schema(cls):
        "Compile the schema again, so that classes registered since then are accepted."
        cls.model_rebuild(force=True)


class PydanticClassRegistryMixin(ReloadableBaseModel, ClassRegistryMixin):
    "A pydantic base class that validates to whichever registered class its field `schema_discriminator` names."

    schema_discriminator: ClassVar[str]  # the field that carries the name

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if PydanticClassRegistryMixin in cls.__bases__:
            cls.registry = {}

    @classmethod
    def register_decorator(cls, klass: type, name: str | None = None) -> type:
        """Enter `klass` as `name` and compile the union of this base again. Errors: TypeError
        for what is no pydantic model."""
        if not (isinstance(klass, type) and issubclass(klass, BaseModel)):
            raise TypeError(f"{cls.__name__}: {klass!r} is no pydantic model; subclass BaseModel")
        super().register_decorator(klass, name)
        cls.reload_schema()
        return klass

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        if "registry" not in cls.__dict__ or not cls.registry:
            return handler(source)
        return core_schema.tagged_union_schema(
            {n: handler(c) for n, c in cls.registry.items()}, discriminator=cls.schema_discriminator
        )


MOST_WIDE = 1024  # children of a node


class TokenProposalConfig(PydanticClassRegistryMixin):
    """Base of all proposal methods. Subclasses register the word that is written in
    `proposal_type`; unknown fields are refused by name."""

    schema_discriminator: ClassVar[str] = "proposal_type"
    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    proposal_type: str = Field(description="Which proposal method this is; the name that the class registered under.")


@TokenProposalConfig.register("greedy")
class GreedyTokenProposalConfig(TokenProposalConfig):
    "A chain of draft tokens, accepted against the verifier's likeliest ones."

    proposal_type: Literal["greedy"] = "greedy"
    speculative_tokens: int = Field(default=5, ge=1, le=MOST_DRAFTED, description="How many tokens to draft at a time.")
    verifier_accept_k: int = Field(
        default=1, ge=1, le=2**20, description="Accept a draft token that is among the verifier's k likeliest."
    )
    accept_tolerance: float = Field(
        default=0.0, ge=0.0, description="Accept a draft token within this log-likelihood of the verifier's best."
    )


@TokenProposalConfig.register("sampling")
class SamplingTokenProposalConfig(TokenProposalConfig):
    "A chain of sampled tokens, accepted by the ratio of the verifier's and the drafter's probability."

    proposal_type: Literal["sampling"] = "sampling"
    speculative_tokens: int = Field(default=5, ge=1, le=MOST_DRAFTED, description="How many tokens to draft at a time.")
    accept_lenience: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="1 keeps the verifier's distribution exactly; smaller values accept more.",
    )


@TokenProposalConfig.register("static_tree")
class StaticTreeTokenProposalConfig(TokenProposalConfig):
    "A tree of one fixed shape: the first level and the later levels have their own branching factor."

    proposal_type: Literal["static_tree"] = "static_tree"
    initial_branching_factor: int = Field(
        default=4, ge=1, le=MOST_WIDE, description="Children of the last decided token."
    )
    branching_factor: int = Field(default=2, ge=1, le=MOST_WIDE, description="Children of every other inner node.")
    depth: int = Field(default=5, ge=1, le=MOST_DRAFTED, description="Draft tokens on the longest path.")

    @model_validator(mode="after")
    def _fits_into_a_forward_pass(self):
        nodes = level = self.initial_branching_factor
        for _ in range(self.depth - 1):
            level *= self.branching_factor
            nodes += level
            if nodes > MOST_DRAFTED:
                raise ValueError(
                    f"depth={self.depth}: with branching_factor={self.branching_factor} the "
                    f"tree has more than {MOST_DRAFTED} tokens; lower one of them"
                )
        return self


@TokenProposalConfig.register("dynamic_tree")
class DynamicTreeTokenProposalConfig(TokenProposalConfig):
    "A tree grown by confidence: the best nodes of each level are expanded, the best of all are verified."

    proposal_type: Literal["dynamic_tree"] = "dynamic_tree"
    speculative_tokens: int = Field(default=48, ge=1, le=MOST_DRAFTED, description="Nodes kept for verification.")
    expansion_factor: int = Field(
        default=10, ge=1, le=MOST_WIDE, description="Nodes expanded at each level, and children tried for each."
    )
    depth: int = Field(default=6, ge=1, le=MOST_DRAFTED, description="Draft tokens on the longest path.")
