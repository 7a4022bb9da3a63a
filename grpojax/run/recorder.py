"""Records that only the first process of a run writes. If that fails, it warns, and the run goes on."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from etils import epath

from grpojax.host import processes
from grpojax.host.console import log
from grpojax.host.errors import UserError
from grpojax.records import metrics


@contextlib.contextmanager
def optional(what: str) -> Iterator[None]:
    """Inside the context, a failure is only a warning; a `UserError` is still raised.

    Args:
      what: name of the work, for the warning.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        log.warning("%s: %s: %s", what, type(e).__name__, e)


class Recorder:
    """A run's `grpojax.records.metrics.Metrics`, in the process that writes them. Failed writes are counted.

    Args:
      directory: of the run.
      resume_at: lines of later steps are dropped.
      config: what is kept.
      wandb: the run of Weights & Biases that gets the metrics too; None for none.
    """

    def __init__(self, directory: epath.Path, resume_at: int, config: metrics.TrackingConfig, wandb: Any | None = None):
        kind = metrics.Metrics if processes.is_first() else metrics.NoMetrics
        self._metrics = kind(directory, resume_at, config, wandb)
        self.wants_samples = self._metrics.wants_samples
        self._missing: dict[str, list[int]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of a step."""
        with self._counted("metrics", step):
            self._metrics.write(step, values)

    def write_samples(self, step: int, samples: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Records the samples of a step: a thread computes and writes them, once the earlier ones are written."""
        self._join()
        self._writing = self._thread.submit(self._write_samples, step, samples)

    def _write_samples(self, step: int, samples: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        with self._counted("samples", step):
            self._metrics.write_samples(step, samples())

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def flush(self) -> None:
        """Waits until all records are in their files."""
        self._join()
        with optional("the files of metrics"):
            self._metrics.flush()

    def close(self) -> None:
        """Closes the files, and reports the records that are missing."""
        self._thread.shutdown()
        with optional("the files of metrics"):
            self._metrics.close()
        for what, steps in self._missing.items():
            log.warning("%s of %d steps may be missing, the first of step %d", what, len(steps), steps[0])

    @contextlib.contextmanager
    def _counted(self, what: str, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self._missing.setdefault(what, []).append(step)
            log.warning("the %s of step %d are not kept: %s: %s", what, step, type(e).__name__, e)
