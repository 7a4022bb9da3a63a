"""The environments of a run in worker processes: an instance for each episode, kept apart from what misbehaves.

Instances share workers. One that dies, hangs or floods its output takes its worker's process with it, or its own
instance: its episode is invalid then. Another episode of that process gets a new instance where it is asked the next
time. If its class states that it is deterministic, its earlier calls are made again. Else it is drawn again
(`Reply.again`).
"""

import contextlib
import dataclasses
import functools
import logging
import math
import pickle
import queue
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal

from grpojax.extensions.episodes import calls, environment_worker
from grpojax.extensions.episodes.arguments import check
from grpojax.extensions.episodes.environment_config import EnvironmentChoice, EnvironmentConfig
from grpojax.extensions.episodes.environment_types import Episode, Reply
from grpojax.extensions.episodes.environment_worker import Asked, EnvironmentProbe, History, InstanceRecipe, PlayedTurn
from grpojax.host import isolation
from grpojax.host.errors import UserError
from grpojax.rewards import pool, sandbox

log = logging.getLogger("grpojax")

IMPORT_TIMEOUT_S = 300.0
NOTICE_S = 5.0  # seconds after which the log says what is waited for
MOST_CALLS = 8  # of a turn; each may take environment.seconds
MOST_LOSSES = 3  # of its worker, after which an episode is invalid: it may be what ends the worker
# What makes schemas, which takes a second to import: all processes get it from the one that they come from.
SCHEMAS = "transformers.utils.chat_template_utils"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """An instance as it is, for another process: pickled to there, it becomes a copy of the instance."""

    pickled: bytes

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.pickled,)


@dataclasses.dataclass
class _Instance:
    """What is known of an episode here: its worker, and what it takes to make it anew.

    Attributes:
      choice: name of its environment among the recipe's.
      home: number of its worker.
      history: as `environment_worker.History`.
      read: the calls of the turn that is played.
      asked: those of them that go to the worker.
      invalid: why it does not count; None if it does.
      played: whether calls have reached the worker.
      losses: how often its worker was lost while that worked for this episode.
    """

    choice: str | None
    home: int
    history: History
    read: Sequence[calls.Call] = ()
    asked: tuple[Asked, ...] = ()
    invalid: str | None = None
    played: bool = False
    losses: int = 0

    @property
    def starts_over(self) -> bool:
        """Whether a new instance can only begin the episode again."""
        return self.played and self.history.kept == "unknown"


@dataclasses.dataclass
class _Job:
    """Something that a worker does for an episode.

    Attributes:
      kind: what it does.
      spared: whether its worker was lost while that worked for another episode.
      then: what follows once an instance is there again.
      over: whether it is done; then ``value`` is what ``reset`` or ``get_reward`` returned, or the snapshot, and
        ``detail`` says why the episode became invalid.
    """

    episode: Episode
    instance: _Instance
    kind: Literal["open", "play", "reward", "snapshot", "revive"]
    spared: bool = False
    then: "_Job | None" = None
    over: bool = False
    value: Any = None
    detail: str = ""


class Workers:
    """`grpojax.extensions.episodes.environment_types.Environments` in worker processes.

    Args:
      config: the recipe's section.
      template: the policy's chat template, which shows how it writes a call; None where ``config.format`` says so.

    Attributes:
      tools: the JSON schemas of each environment's tools, by the name in a row's column ``environment``.
      rewarded: whether each of them has ``get_reward``.
      invalid: how many episodes became invalid, by reason.

    Raises:
      UserError: an environment cannot be made, a tool has no schema, or the system cannot take the network away.
    """

    def __init__(self, config: EnvironmentConfig, template: str | None = None):
        self.config = config
        self._parse = _parser(config.format, template)
        if not config.network and not isolation.network_can_be_cut():
            raise UserError(
                "environment.network=false: this system has no user namespaces to take the network from tools\n"
                "set environment.network: true to run them with it"
            )
        self._made = {name: _made(choice) for name, choice in config.all_choices.items()}
        self._probes = self._probe_all()
        self._schemas = {
            name: {schema["function"]["name"]: schema["function"] for schema in probe.schemas}
            for name, probe in self._probes.items()
        }
        self.tools = {name: probe.schemas for name, probe in self._probes.items()}
        self.rewarded = {name: probe.rewards for name, probe in self._probes.items()}
        self.invalid: Counter[str] = Counter()
        self._workers = [self._start() for _ in range(config.workers or min(16, pool.cores()))]
        self._finalizer = weakref.finalize(self, pool.close_all, self._workers)
        self._instances: dict[Episode, _Instance] = {}
        self._jobs: dict[Future, _Job] = {}
        self._done: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._progress = time.monotonic()
        self._ready: dict[Episode, Reply] = {}
        self._shown: set[tuple[str | None, str]] = set()
        self._resets: set[str | None] = set()  # the environments of which a reset has worked
        self._next = 0

    def _start(self) -> pool.WorkerPool:
        paths = [path for made in self._made.values() for path in (made.path, *made.tools) if path is not None]
        return pool.WorkerPool(
            count=1,
            timeout_s=self.config.seconds,
            memory_mb=self.config.memory,
            functions=list(dict.fromkeys(paths)),
            preload=["grpojax.extensions.episodes.environment_worker"],
            network=self.config.network,
            first=functools.partial(environment_worker.prepare, list(self._made.values()), self.config.max_tool_bytes),
        )

    def _probe_all(self) -> dict[str | None, EnvironmentProbe]:
        """Looks at all environments, in a process that has more time and memory than those of the run."""
        log.info("environments run %s", "; ".join(map(_name, self._made.values())))
        looking = pool.WorkerPool(
            count=1,
            timeout_s=IMPORT_TIMEOUT_S,
            memory_mb=0,
            preload=["grpojax.extensions.episodes.environment_worker", SCHEMAS],
            network=self.config.network,
        )
        try:
            found = {}
            for name, made in self._made.items():
                future = looking.submit(environment_worker.probe, made)
                if wait([future], NOTICE_S).not_done:
                    log.info("waiting for environment %s, which is imported and made", _name(made))
                reason = pool.failure(looking.next_done([future]))
                if reason == "timeout":
                    raise _never_made(made)
                found[name] = future.result() if reason is None else EnvironmentProbe(f"its process ended by {reason}")
                if problem := found[name].problem:
                    raise UserError(f"environment{'' if name is None else f' {name!r}'}: {_one_line(problem)}")
        finally:
            looking.close()
        return found

    # -------------------------------------------------------------------------------------------- what a row gets

    def _choice(self, row: Mapping[str, Any]) -> str | None:
        if not self.config.choices:
            return None
        name = row.get("environment")
        if name not in self._made:
            raise UserError(
                f"a row's column 'environment' is {name!r}, which environment.choices does not have; "
                f"it has {', '.join(map(repr, self._made))}"
            )
        return name

    def deterministic(self, row: Mapping[str, Any]) -> bool:
        """Whether the class of a row's environment states that the same actions give the same observations."""
        return self._probes[self._choice(row)].deterministic

    def check_columns(self, row: Mapping[str, Any]) -> None:
        """Raises `UserError` where a row names no environment, or lacks a column that ``reset`` needs."""
        choice = self._choice(row)
        if missing := [name for name in self._probes[choice].needs if name not in row]:
            raise UserError(
                f"environment {self._made[choice].path!r} asks for column {missing[0]!r}; the data has "
                f"{', '.join(sorted(row))[:400] or 'none'}"
            )

    # -------------------------------------------------------------------------------------------- the protocol

    def open(self, rows: Mapping[Episode, Mapping[str, Any]]) -> dict[Episode, str | list[Any] | None]:
        """Resets one instance for each episode; waits for all.

        An episode whose ``reset`` fails is invalid, which its first reply says.

        Args:
          rows: the columns of each episode's problem.

        Raises:
          UserError: the first row lacks what ``reset`` needs, or no episode of an environment's first rows could be
            reset.
          ValueError: an episode is open already.
        """
        for row in list(rows.values())[:1]:
            self.check_columns(row)
        if twice := [episode for episode in rows if episode in self._instances]:
            raise ValueError(f"episode {twice[0]} is open already")
        jobs = []
        for episode, row in rows.items():
            choice = self._choice(row)
            columns = {k: v for k, v in row.items() if not (self.config.choices and k == "environment")}
            history = History(made=self._made[choice], row=columns, kept=_kept(self._probes[choice]))
            instance = _Instance(choice, self._next % len(self._workers), history)
            self._next += 1
            self._instances[episode] = instance
            jobs.append(self._submit(_Job(episode, instance, "open")))
        self._finish(jobs)
        failed = [job for job in jobs if job.instance.invalid and job.instance.choice not in self._resets]
        if failed and len(failed) == len(jobs):
            self.close(list(rows))
            last = failed[0].detail.rstrip().splitlines()[-1]
            more = (
                "\nset environment.seconds higher if it takes longer" if failed[0].instance.invalid == "timeout" else ""
            )
            raise UserError(f"environment: reset failed for all {len(rows)} episodes: {last[:300]}{more}")
        return {job.episode: job.value for job in jobs}

    def play(self, turns: Mapping[Episode, str]) -> None:
        """Reads the calls in each text, and has workers make them. Returns at once; `replies` has what comes of it.

        Raises:
          ValueError: an episode is not open, or its last turn is not over.
        """
        for episode, text in turns.items():
            instance = self._still(episode)
            if episode in self._ready:
                raise ValueError(f"episode {episode} has a reply that was not taken")
            schemas = self._schemas[instance.choice]
            read = calls.read(text, self._parse)
            read = [check(c, schemas) for c in read[:MOST_CALLS]] + [_not_made(c) for c in read[MOST_CALLS:]]
            asked = tuple(Asked(call.name, call.arguments) for call in read if call.error is None)
            if instance.invalid is not None or not asked:
                self._ready[episode] = _reply(instance.invalid, read, PlayedTurn())
            else:
                instance.read, instance.asked = read, asked
                self._submit(_Job(episode, instance, "play"))

    def replies(self, timeout: float | None = None) -> dict[Episode, Reply]:
        """The replies that are there; waits until one is, or the time is over. Empty where nothing is played."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._take_done(0)
        while not self._ready and any(job.kind in ("play", "revive") for job in self._jobs.values()):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._take_done(left)
        ready, self._ready = self._ready, {}
        return ready

    def rewards(self, episodes: Sequence[Episode]) -> list[float | None]:
        """``get_reward()`` of each episode; None where its class has none, and NaN where the episode is invalid, or is
        drawn again, which a reply says.

        Raises:
          ValueError: an episode is not open, or its last turn is not over.
        """
        with_reward = [e for e in episodes if self._probes[self._still(e).choice].rewards]
        values = self._ask("reward", with_reward)
        return [math.nan if self._instances[e].invalid or e in self._ready else values.get(e) for e in episodes]

    def snapshots(self, episodes: Sequence[Episode]) -> list[Snapshot | None]:
        """The instances of episodes as they are, for rewards that ask for the column ``environments``.

        A reward's worker gets a copy of each instance. None where the episode is invalid, or is drawn again.

        Raises:
          UserError: an instance cannot be pickled.
          ValueError: an episode is not open, or its last turn is not over.
        """
        values = self._ask("snapshot", episodes)
        for episode, value in values.items():
            if isinstance(value, str):
                path = self._made[self._instances[episode].choice].path
                raise UserError(
                    f"environment {path!r} cannot be given to rewards: {value[:300]}\n"
                    "leave that out by __getstate__, or give the class get_reward and take the reward 'environment'"
                )
        there = {e for e in values if not self._instances[e].invalid and e not in self._ready}
        return [Snapshot(values[e]) if e in there else None for e in episodes]

    def _still(self, episode: Episode) -> _Instance:
        """An open episode between two turns."""
        instance = self._instances.get(episode)
        if instance is None or instance.read:
            raise ValueError(f"episode {episode} is {'not open' if instance is None else 'still playing'}")
        return instance

    def _ask(self, kind: Literal["reward", "snapshot"], episodes: Sequence[Episode]) -> dict[Episode, Any]:
        """What the workers say of the episodes that count."""
        instances = {episode: self._still(episode) for episode in episodes}
        counts = [e for e, instance in instances.items() if instance.invalid is None and e not in self._ready]
        jobs = [self._submit(_Job(e, instances[e], kind)) for e in counts]
        self._finish(jobs)
        return {job.episode: job.value for job in jobs}

    def close(self, episodes: Sequence[Episode] | None = None) -> None:
        """Drops these episodes' instances; None drops all and ends the workers."""
        if episodes is None:
            self._instances.clear(), self._jobs.clear(), self._ready.clear()
            self._finalizer()
            return
        by_home: dict[int, list[Episode]] = {}
        for episode in episodes:
            instance = self._instances.pop(episode, None)
            self._ready.pop(episode, None)
            if instance is not None:
                by_home.setdefault(instance.home, []).append(episode)
        for home, closed in by_home.items():
            self._workers[home].submit(environment_worker.close, closed)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------------- jobs

    def _submit(self, job: _Job) -> _Job:
        instance = job.instance
        workers, episode = self._workers[instance.home], (job.episode, instance.history)
        most, seconds = self.config.max_tool_bytes, self.config.seconds
        if job.kind == "open":
            future = workers.submit(environment_worker.open_, *episode, most, timeout_s=seconds)
        elif job.kind == "play":
            asked, made = instance.asked, instance.history.made
            future = workers.submit(
                environment_worker.play, job.episode, made, asked, most, timeout_s=seconds * len(asked)
            )
        elif job.kind == "reward":
            future = workers.submit(environment_worker.reward, job.episode, most, timeout_s=seconds)
        elif job.kind == "snapshot":
            future = workers.submit(environment_worker.snapshot, job.episode, timeout_s=seconds)
        else:
            calls_before = sum(len(asked) for asked, _ in instance.history.turns)
            future = workers.submit(environment_worker.revive, *episode, most, timeout_s=seconds * (1 + calls_before))
        self._jobs[future] = job
        self._progress = time.monotonic()
        future.add_done_callback(self._done.put)
        return job

    def _finish(self, jobs: Sequence[_Job]) -> None:
        """Waits for jobs, and what takes their place."""
        said = False
        for job in jobs:
            while not job.over:
                self._take_done(NOTICE_S)
                if not said and time.monotonic() - self._progress >= NOTICE_S:
                    said, count = True, sum(not other.over for other in jobs)
                    what = {"open": "reset", "reward": "get_reward"}.get(job.kind, job.kind)
                    log.info("waiting for environment %s: %s, %d", _name(job.instance.history.made), what, count)

    def _take_done(self, timeout: float) -> None:
        """Takes in the jobs that are done; waits for one of them, at most so many seconds.

        Each job has a limit of its own. If none is done in the longest time that one may take, after the start of a
        new process, all are lost.
        """
        longest = self.config.seconds * max((_calls(job) for job in self._jobs.values()), default=1)
        lost = self._progress + IMPORT_TIMEOUT_S + longest + pool.GRACE - time.monotonic()
        try:
            done = [self._done.get(timeout=max(0.0, min(timeout, lost)))]
        except queue.Empty:
            if lost <= 0 < timeout:
                self._give_up()
            return
        self._progress = time.monotonic()
        while not self._done.empty():
            done.append(self._done.get())
        for future in done:
            job = self._jobs.pop(future, None)
            if job is not None and self._instances.get(job.episode) is job.instance:  # else it was closed meanwhile
                self._take(job, future)

    def _give_up(self) -> None:
        if not self._resets and not any(future.running() for future in self._jobs):  # no worker has come so far
            raise _never_made(next(iter(self._jobs.values())).instance.history.made)
        for home in {job.instance.home for job in self._jobs.values()}:
            self._workers[home].restart()
        for future in list(self._jobs):
            with contextlib.suppress(Exception):  # done meanwhile
                future.set_exception(BrokenProcessPool("the workers were lost"))
        self._progress = time.monotonic()

    def _take(self, job: _Job, future: Future) -> None:
        """Takes in what a job came to."""
        reason, value, played = pool.failure(future), None, PlayedTurn()
        if reason == "broken" and self._may_go_on(job):
            self._submit(job)
            return
        if reason is not None:
            self._workers[job.instance.home].end_orphans()
            played = PlayedTurn(invalid=reason, detail=self._limit(reason))
        elif (result := future.result()) is None:  # the process does not have the instance any more
            self._submit(_Job(job.episode, job.instance, "revive", then=job))
            return
        elif job.kind in ("play", "revive"):
            played = result
        else:
            value, played = result
        if played.invalid is not None:
            self._spoil(job, played)
        elif played.detail:
            log.debug("environment printed in episode %s:\n%s", job.episode, played.detail)
        if job.kind == "revive" and job.then is not None:
            again = played.invalid is None and job.instance.starts_over
            if played.invalid is None and not again:
                self._submit(job.then)
                return
            job = job.then
            if again:
                self._begin_again(job)
                return
        job.over, job.value, job.detail = True, value, played.detail
        self._note(job, played)

    def _may_go_on(self, job: _Job) -> bool:
        """Whether a job whose worker was lost is done again. The worker was at the first of its jobs then."""
        instance = job.instance
        if job.spared:
            job.spared = False
            return True
        for other in self._jobs.values():
            other.spared |= other.instance.home == instance.home
        instance.losses += 1
        return instance.losses < MOST_LOSSES

    def _begin_again(self, job: _Job) -> None:
        """Takes note that an episode stands after its ``reset`` again, where a job found its instance gone."""
        job.over, instance = True, job.instance
        instance.read, instance.asked, instance.played = (), (), False
        self._ready[job.episode] = Reply(messages=(), again=True)

    def _note(self, job: _Job, played: PlayedTurn) -> None:
        """Takes note of what a job has changed."""
        instance = job.instance
        if job.kind == "open" and played.invalid is None:
            self._resets.add(instance.choice)
            instance.history = dataclasses.replace(instance.history, observed=(job.value,))
        if job.kind == "play":
            instance.played = True
            if played.invalid is None and instance.history.kept == "again":
                turns = (*instance.history.turns, (instance.asked, played.answers))
                instance.history = dataclasses.replace(instance.history, turns=turns)
            self._ready[job.episode] = _reply(instance.invalid, instance.read, played)
            instance.read, instance.asked = (), ()

    def _spoil(self, job: _Job, played: PlayedTurn) -> None:
        """Makes an episode invalid; shows each reason of an environment once."""
        job.instance.invalid = played.invalid
        reason = str(played.invalid)
        self.invalid[reason] += 1
        if (job.instance.choice, reason) not in self._shown:
            self._shown.add((job.instance.choice, reason))
            name, detail = _name(job.instance.history.made), played.detail.rstrip()
            log.warning(
                "environment %s: %s; such episodes are left out, and later ones not shown\n%s", name, reason, detail
            )

    def _limit(self, reason: str) -> str:
        return {
            "timeout": f"it took over environment.seconds={self.config.seconds:g} for a call",
            "memory": f"it took over environment.memory={self.config.memory}",
            "crash": "its worker died",
        }.get(reason, f"its worker was lost {MOST_LOSSES} times during its calls")


def _calls(job: _Job) -> int:
    """How many calls a job makes, for its limit."""
    return max(1, len(job.instance.asked)) + sum(len(asked) for asked, _ in job.instance.history.turns)


def _kept(probe: EnvironmentProbe) -> Literal["nothing", "again", "unknown"]:
    return "nothing" if probe.stateless else "again" if probe.deterministic else "unknown"


def _not_made(call: calls.Call) -> calls.Call:
    return dataclasses.replace(call, error=f"a turn has at most {MOST_CALLS} calls; this one was not made")


def _reply(invalid: str | None, read: Sequence[calls.Call], played: PlayedTurn) -> Reply:
    """The reply to a turn with these calls; ``played`` has the answers of those that reached the worker."""
    malformed = sum(call.error is not None for call in read)
    counts = {"calls": len(read), "malformed": malformed}
    counts["failures"] = malformed + sum(answer.failed for answer in played.answers)
    if invalid is not None:
        return Reply(messages=(), invalid=invalid, **counts)
    given = iter(played.answers)
    texts = [next(given).text if call.error is None else f"Error: {call.error}" for call in read]
    messages = tuple(
        {
            "role": "tool",
            "name": environment_worker.encodable(call.name[:200]),
            "content": environment_worker.encodable(text),
        }
        for call, text in zip(read, texts, strict=True)
    )
    return Reply(messages=messages, done=played.done, **counts)


def _name(made: InstanceRecipe) -> str:
    return made.path or ", ".join(made.tools)


def _never_made(made: InstanceRecipe) -> UserError:
    return UserError(
        f"environment {_name(made)}: a process takes over {IMPORT_TIMEOUT_S:g} s to import it and to make an instance\n"
        "find out what its module or its __init__ waits for, and do that beforehand, or in reset"
    )


def _made(choice: EnvironmentChoice) -> InstanceRecipe:
    return InstanceRecipe(choice.path, choice.options, choice.tools)


def _parser(form: str, template: str | None) -> calls.Parse:
    name = calls.format_of(template) if form == "auto" else form
    if name in calls.FORMATS:
        return calls.FORMATS[name]
    try:
        return sandbox.imported(name)
    except Exception as e:
        raise UserError(f"environment.format={name!r}: cannot be imported: {type(e).__name__}: {e}") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
