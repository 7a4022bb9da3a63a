"""The ``environment`` section of a recipe."""

import dataclasses
import difflib
import json
from typing import Any

from grpojax import extension
from grpojax.extensions.episodes.calls import FORMATS
from grpojax.host.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentChoice:
    """One environment of several, which rows name in their column ``environment``.

    Attributes:
      name: as ``environment.name``.
      options: as ``environment.options``.
      tools: as ``environment.tools``.
    """

    name: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name is None and not self.tools:
            raise UserError("name and tools are both missing: give the name of an environment, or a list of functions")
        if self.name is None and self.options:
            raise UserError("options: they are for the class that name gives; leave them out, or give name")
        if self.name is not None and self.path == self.name and not _is_path(self.name):
            names = sorted(extension.words("environments"))
            close = difflib.get_close_matches(self.name, names, n=1)
            known = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'},"
            raise UserError(f"environment {self.name!r} is unknown; {known} or package.module:Class")
        if wrong := [path for path in self.tools if not _is_path(path)]:
            raise UserError(f"tools: {wrong[0]!r} is no function; give package.module:function")
        if twice := sorted({path for path in self.tools if self.tools.count(path) > 1}):
            raise UserError(f"tools: {twice[0]!r} occurs twice; give it once")
        try:
            json.dumps(self.options)
        except (TypeError, ValueError) as e:
            raise UserError(f"options must be plain numbers, texts, lists and mappings: {e}") from None

    @property
    def path(self) -> str | None:
        """The import path of its class; None for stateless tools alone."""
        return None if self.name is None else extension.words("environments").get(self.name, self.name)


def _is_path(text: str) -> bool:
    return all(text.partition(":")[::2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """The tools that the policy may call, and the environment that it acts in. Each sample has an instance of its own.

    Attributes:
      name: a built-in environment ("calculator", "frozen_lake", "python", "reasoning_gym", "search" or "textarena"), or
        the import path ``package.module:Class`` of a class whose ``reset`` gets the columns of a row, and whose other
        public methods are tools. None for ``tools`` without a class, and with ``choices``.
      options: keyword arguments of the class.
      tools: import paths ``package.module:function`` of functions that are tools too. They keep nothing between calls.
      choices: several environments by a name of your own. The column ``environment`` of a row says which one it gets.
        Takes the place of ``name``, ``options`` and ``tools``.
      format: how the policy writes a call: "hermes" (JSON in ``<tool_call>``), "llama" (JSON with ``parameters``),
        "qwen_xml" (``<function=name>``), or the import path of a function that reads calls from a text. "auto" finds
        the form in the chat template.
      max_turns: most turns of an episode. The last one may call no tool.
      max_tool_tokens: most tokens of a tool's answer; what is longer is cut.
      max_tool_bytes: most bytes of a tool's answer; what is longer is cut. A worker whose tools print more than this in
        a turn has an instance that misbehaves.
      seconds: most seconds of a call. A turn with several calls, of which the first 8 are made, has as many times this,
        and so has one that is played again.
      memory: most MiB of address space of a worker, besides its imports; 0 sets no limit.
      workers: number of worker processes; 0 takes one for each core, up to 16. Those of tools that wait for others may
        be more than the cores.
      network: whether tools may use the network. False takes it from them, which needs Linux with user namespaces.
    """

    name: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tools: tuple[str, ...] = ()
    choices: dict[str, EnvironmentChoice] = dataclasses.field(default_factory=dict)
    format: str = "auto"
    max_turns: int = 8
    max_tool_tokens: int = 256
    max_tool_bytes: int = 65536
    seconds: float = 10.0
    memory: int = 2048
    workers: int = 0
    network: bool = False

    def __post_init__(self) -> None:
        unset = {"name": "null", "options": "{}", "tools": "[]"}
        given = [f"{key}: {empty}" for key, empty in unset.items() if getattr(self, key) not in (None, {}, ())]
        if self.choices and given:
            raise UserError(f"choices: it takes the place of name, options and tools; set {', '.join(given)}")
        if not self.choices:
            self._only()
        if self.format not in ("auto", *FORMATS) and not _is_path(self.format):
            raise UserError(f"format={self.format!r}: give auto, {', '.join(FORMATS)}, or package.module:function")
        require(self, max_turns="[1, 10000]", max_tool_tokens="[1, inf)", max_tool_bytes="[64, inf)")
        require(self, seconds="(0, 3600]", workers="[0, 1024]")
        if self.memory and not 64 <= self.memory <= 2**24:
            raise UserError(f"memory={self.memory}: must be 0 (no limit), or between 64 and {2**24}")

    def _only(self) -> EnvironmentChoice:
        return EnvironmentChoice(name=self.name, options=self.options, tools=self.tools)

    @property
    def all_choices(self) -> dict[str | None, EnvironmentChoice]:
        """The environments by what a row's column ``environment`` says; a single one stands under None."""
        return {**self.choices} if self.choices else {None: self._only()}
