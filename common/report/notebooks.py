"""Executes notebooks with papermill."""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from common.errors import RunFailed, UserError
from common.runtime.notebook_cells import without_answers


def execute_notebooks(
    notebooks: Sequence[Path],
    folder: Path,
    parameters: Mapping[str, object],
    on_progress: Callable[[str], None] = lambda line: None,
    *,
    with_answers: bool = False,
) -> tuple[list[Path], list[UserError]]:
    """Executes each notebook with the parameters; the results go to ``folder``.

    The staff's cells are left out unless ``with_answers``.

    Returns:
        the notebooks that were executed, and the UserErrors of cells in the others.

    Raises:
        RunFailed: a cell failed in another way, or a kernel died; the message names the notebook.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import papermill
        from nbclient.exceptions import DeadKernelError

        from common.report.kernel import end_kernels
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    folder.mkdir(exist_ok=True)

    def execute(notebook: Path) -> Path | UserError:
        on_progress(notebook.stem)
        result = folder / notebook.name
        text = notebook.read_text(encoding="utf-8")
        result.write_text(text if with_answers else without_answers(text), encoding="utf-8")
        try:
            papermill.execute_notebook(
                result,
                result,
                parameters=dict(parameters),
                kernel_name="python3",
                kernel_manager_class="common.report.kernel.LocalKernelManager",
                # papermill's own cwd would be this process's, and so the other thread's, too.
                resources={"metadata": {"path": str(notebook.parent.absolute())}},
                progress_bar=False,
                log_output=False,
            )
        except papermill.PapermillExecutionError as error:
            if error.ename in ("UserError", "NotYetWritten"):
                result.unlink(missing_ok=True)
                return UserError(f"{notebook.stem}: {error.evalue}")
            message = re.sub(r"\x1b\[[0-9;]*m", "", f"{error.ename}: {error.evalue}")
            raise RunFailed(f"{notebook.stem}, cell {error.exec_count}: {message}") from None
        except DeadKernelError:
            why = "its kernel died, perhaps of lack of memory"
            raise RunFailed(f"{notebook.stem}: {why}") from None
        return result

    with ThreadPoolExecutor(max_workers=2) as pool:  # a kernel mostly waits for imports
        futures = [pool.submit(execute, notebook) for notebook in notebooks]
        try:
            results = [future.result() for future in futures]
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            while isinstance(error, KeyboardInterrupt) and not all(map(Future.done, futures)):
                end_kernels()  # again, as a thread may be about to start one
                time.sleep(0.1)
            raise
    executed = [result for result in results if isinstance(result, Path)]
    return executed, [result for result in results if isinstance(result, UserError)]
