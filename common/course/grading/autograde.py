"""Gradescope's grader: ``python -m common.course.grading.autograde SUBMISSION RESULTS``.

SUBMISSION is the folder of what a student uploaded, which is one tarball, and RESULTS the file that
Gradescope reads. Whatever happens in here, that file is there afterwards; of a fault of the grader
it says so, and the traceback is printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common.course.grading.grade import Grader, write_json
from common.errors import RunFailed, UserError
from common.runtime.paths import project_root


def main() -> None:
    """Grades, or says why not; a fault of the grader is raised afterwards."""
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        variant = int(sys.argv[3]) if len(sys.argv) > 3 else 0
        tarballs = sorted(folder.glob("*.tar.gz"))
        if len(tarballs) != 1:
            raise UserError(
                f"{len(tarballs)} tarballs were uploaded; expected one, of `ddplab handin`"
            )
        write_json(Grader(project_root(), variant).grade(tarballs[0]), results)
    except (UserError, RunFailed) as error:
        write_refusal(results, str(error))
        print(error)
    except Exception as error:
        write_refusal(results, f"not graded: {type(error).__name__} in the grader; tell the staff")
        raise


def write_refusal(results: Path, reason: str) -> None:
    """Writes a result without points that says why there are none."""
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps({"score": 0.0, "output": reason, "tests": []}) + "\n")


if __name__ == "__main__":
    main()
