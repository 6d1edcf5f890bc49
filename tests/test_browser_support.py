"""What tests of pages rely on: a browser that notices what goes wrong in one."""

from pathlib import Path

import pytest
from browser_support import axe_violations, open_page

FAULTY = """<!doctype html><html lang="en"><title>Faulty</title><h1>Faulty</h1>
<img src="missing.png"><script>
console.error("told"); console.log("not an error"); setTimeout(() => { throw Error("thrown") });
</script></html>"""
SOUND = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'">
<title>Sound</title><main><h1>Sound</h1></main></html>"""


def written(folder: Path, text: str) -> Path:
    path = folder / "page.html"
    path.write_text(text)
    return path


def test_what_goes_wrong_in_a_page_is_noticed_and_what_axe_finds(chromium, tmp_path):
    with open_page(chromium, written(tmp_path, FAULTY)) as (page, problems):
        for _ in range(100):  # the exception comes when the page is there already
            page.wait_for_timeout(50)
            if any("thrown" in problem for problem in problems):
                break
        violations = axe_violations(page)
    assert any("image-alt" in violation for violation in violations)
    assert any("told" in problem for problem in problems)
    assert any("thrown" in problem for problem in problems)
    assert any("request" in problem and "missing.png" in problem for problem in problems)
    assert not any("not an error" in problem for problem in problems)


@pytest.mark.parametrize("dark", [False, True])
def test_a_sound_page_has_the_size_and_colours_that_were_asked_for(dark, chromium, tmp_path):
    address = written(tmp_path, SOUND).as_uri()
    with open_page(chromium, address, 360, 500, dark) as (page, problems):
        assert page.evaluate("[innerWidth, innerHeight]") == [360, 500]
        assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == dark
        assert axe_violations(page) == []  # no script may run in this page, but axe does
    assert problems == []
