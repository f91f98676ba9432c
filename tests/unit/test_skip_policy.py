from __future__ import annotations

import pytest

from tests import skip_policy

TESTS = """
    import pytest

    @pytest.mark.skipif(True, reason="needs a browser")
    def test_browser(): ...

    def test_inside():
        pytest.importorskip("no_such_package_at_all")

    @pytest.mark.skipif(True, reason="needs a GPU")
    def test_gpu(): ...

    @pytest.mark.xfail(strict=True)
    def test_expected():
        assert False

    def test_good(): ...
"""


def run(pytester: pytest.Pytester, source: str) -> dict[str, int]:
    pytester.makepyfile(source)
    ran = pytester.runpytest_inprocess("-p", "no:randomly", plugins=[skip_policy])
    return ran.parseoutcomes()


def test_ci_refuses_every_skip_but_for_a_gpu(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package or browser may not quietly switch tests off in CI."""
    monkeypatch.setenv("PACELINE_CI", "1")
    outcomes = run(pytester, TESTS)  # a mark's skip is raised in the set-up, hence an error
    assert outcomes == {"passed": 1, "failed": 1, "errors": 1, "skipped": 1, "xfailed": 1}


def test_ci_refuses_a_skipped_module(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole file may not be skipped either."""
    monkeypatch.setenv("PACELINE_CI", "1")
    source = "import pytest\npytest.importorskip('no_such_package_at_all')\ndef test_it(): ...\n"
    assert run(pytester, source) == {"errors": 1}


def test_skips_are_skips_elsewhere(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A developer without root still gets a green run."""
    monkeypatch.delenv("PACELINE_CI", raising=False)
    assert run(pytester, TESTS) == {"passed": 1, "skipped": 3, "xfailed": 1}
