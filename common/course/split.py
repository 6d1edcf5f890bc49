"""A public project, and the overlay with all that it must not show: solutions, hidden tests, keys.

With the overlay the public project is this one: it exports the same trees and grades alike.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from common.course.export import student_file, student_page, tracked_files, write_tree
from common.course.overlay import require_solutions
from common.course.tasks import read_course
from common.errors import UserError


def split(root: Path, public: Path, overlay: Path) -> tuple[int, int]:
    """Writes the public project and the overlay, both or none of them.

    The public one has the files that git tracks at HEAD, but for those that ``course.yaml`` calls
    private. Of a file with solutions it has what a student begins with, and the overlay the whole.

    Args:
        root: the project; nothing may be changed there and not committed.
        public, overlay: folders, which must not exist; none of them inside of the other.

    Returns:
        the numbers of their files.

    Raises:
        UserError: a folder that is there or inside of the other, changes that are not committed,
            markers that do not pair, or a solution that is not there.
    """
    for folder in (public, overlay):
        if folder.exists():
            raise UserError(f"{folder} is there already; give a folder that is not")
    paths = public.absolute(), overlay.absolute()
    if paths[0].is_relative_to(paths[1]) or paths[1].is_relative_to(paths[0]):
        raise UserError(f"{overlay} and {public}: give two folders, none inside of the other")
    files = tracked_files(root)
    require_solutions(root)
    course = read_course(root)
    private = {name for name in files if course.is_private(name)}
    open_files, hidden = {}, {}
    for name in files:
        content = (root / name).read_bytes()
        # The staff's programs speak of markers; students do not get them.
        begun = content if course.leaves_out(name) else student_file(root / name, name, ())
        if name in private or begun != content:
            hidden[name] = content
        if name not in private:
            if name.endswith(".md"):
                begun = student_page(begun.decode(), name, private, set(files) - private).encode()
            open_files[name] = begun
    executable = {name for name in files if (root / name).stat().st_mode & 0o100}
    write_tree(overlay, hidden, executable)
    try:
        write_tree(public, open_files, executable)
    except UserError:
        shutil.rmtree(overlay)
        raise
    return len(open_files), len(hidden)
