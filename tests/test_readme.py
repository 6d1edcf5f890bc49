"""Every command of the README is run by CI, or by a test."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CI = {
    "uv run pytest": "uv run python tests/budget.py",
    "pip install uv": "pip install --quiet uv",
    "uv run ddplab run": "uv run ddplab run --preset smoke",
    "uv run ddplab run assignment2 --preset smoke": "uv run ddplab run --preset smoke",
    "uv run papermill notebooks/assignment2_part1_model.ipynb outputs/part1.ipynb": "uv run "
    "papermill --no-progress-bar notebooks/assignment2_part1_model.ipynb outputs/part1.ipynb",
    "uv run ddplab course export outputs/students --assignment 2": "uv run "
    "ddplab course export outputs/students --assignment 0",
    "uv run ddplab course check outputs/students": "uv run ddplab course check outputs/students "
    "--isolation",
    "uv run ddplab tune common.tuning.examples:convolutions": "uv run ddplab tune "
    "common.tuning.examples:convolutions --share 0.02",
    "uv run ddplab course test A2.1": 'in_tree "$python" -m common.cli.main course test',
    "uv run ddplab course grade submissions/*.tar.gz": "uv run ddplab course grade "
    "outputs/class/*.tar.gz --roster outputs/class/roster.csv --output-dir outputs/class/grades "
    "--variant 2027 --lms canvas",
}
"""The form in which CI runs a command, where it is another one than the README's."""
TEACHING = {
    "uv run ddplab course export ../students-2 --assignment 2": "uv run ddplab course export "
    "outputs/class/tree --assignment 2 --solved A2.1 A2.2 A2.3",
    "uv run ddplab course check ../students-2": "uv run ddplab course check "
    "outputs/students --isolation",
    "git -C ../students-2 init --initial-branch main": "in_tree git init --quiet "
    "--initial-branch main",
    "git -C ../students-2 add --all": "in_tree git add --all",
    'git -C ../students-2 commit --message "Assignment 2"': "in_tree git -c user.name=ci "
    '-c user.email=ci@example.org commit --quiet --message "Assignment 2"',
    "uv run ddplab course test": 'in_tree "$python" -m common.cli.main course test',
    "uv run ddplab run assignment2 --preset smoke": 'in_tree "$python" -m common.cli.main '
    "run assignment2 --preset smoke",
    'uv run ddplab handin assignment2 --name "Jane Doe" --id s1234': 'in_tree "$python" -m '
    'common.cli.main handin assignment2 --name "Jane Doe" --id s1234 --output-dir ..',
    "uv run ddplab course grade submissions --roster roster.csv --due 2027-10-01T23:59+02:00 "
    "--variant 2027": "uv run ddplab course grade outputs/class/*.tar.gz --roster "
    "outputs/class/roster.csv --due 2127-10-01T23:59+02:00 --output-dir outputs/class/grades "
    "--variant 2027",
    "uv run ddplab course grade --variant 2027": "uv run ddplab course grade "
    "--output-dir outputs/class/grades --variant 2027",
    "uv run ddplab course grade late/doe.tar.gz --roster roster.csv --variant 2027 --lms canvas": (
        "uv run ddplab course grade outputs/class/*.tar.gz --roster outputs/class/roster.csv "
        "--output-dir outputs/class/grades --variant 2027 --lms canvas"
    ),
    "uv run ddplab course autograder autograder.zip --assignment 2 --variant 2027": "uv run ddplab "
    "course autograder outputs/class/autograder.zip --assignment 2 --variant 2027",
}
"""The commands of assignments/README.md in the form in which CI runs them."""
TESTS = {
    "uv run ddplab predict --model gpt2-large --cluster h100-ib --gpus 8..16384": "tests/cli/"
    "test_predict_cluster.py",
    "uv run ddplab explore": "tests/explore/test_page.py",
    "uv run ddplab emulate --hosts 2 --rate 1gbit -- assignments/assignment2/ddp_benchmark.py "
    "--config assignments/assignment2/configs/smoke.yaml": "tests/cluster/test_emulated.py",
}
"""The file of the test that runs a command which CI does not."""


def readme_commands(page: str = "README.md") -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", line.strip()) for line in lines if line.strip()]


def is_run_by_ci(command: str) -> bool:
    """Returns whether .ci/run has the command with these arguments and no other ones."""
    ci = re.sub(r"\\\n\s*", "", (ROOT / ".ci" / "run").read_text())
    whole = rf"(?<!\S){re.escape((CI | TEACHING).get(command, command))}\s*(?:$|[>|;])"
    return re.search(whole, ci, flags=re.M) is not None


def is_run_by_its_test(command: str) -> bool:
    test = TESTS.get(command)
    if test is None:
        return False
    text = re.sub(r"\s+", " ", (ROOT / test).read_text())
    return command.removeprefix("uv run ") in text


def test_every_command_is_run_somewhere() -> None:
    commands = readme_commands()
    assert len(commands) > 5
    assert [c for c in commands if not (is_run_by_ci(c) or is_run_by_its_test(c))] == []


def test_every_command_for_teachers_is_run_by_ci() -> None:
    commands = readme_commands("assignments/README.md")
    assert set(commands) == TEACHING.keys()
    assert [command for command in commands if not is_run_by_ci(command)] == []


def test_no_command_is_listed_here_that_the_readme_does_not_have() -> None:
    assert (CI.keys() | TESTS.keys()) - set(readme_commands()) == set()
