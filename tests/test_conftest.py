"""The rule for missing packages in tests/conftest.py."""

import pytest


@pytest.mark.slow
def test_a_missing_package_fails_in_ci(tmp_path, python):
    missing = "pytest.importorskip('no_such_package.part')"
    (tmp_path / "test_module.py").write_text(f"import pytest; {missing}\n")
    body = f"import pytest\ndef test(): {missing}\ndef test_other(): pytest.skip('other')\n"
    (tmp_path / "test_body.py").write_text(body)
    options = ["-p", "tests.conftest", "-c", "/dev/null", "--continue-on-collection-errors"]
    run = python("-m", "pytest", *options, str(tmp_path), check=False, CI="true")
    assert "1 failed, 1 skipped, 1 error" in run.stdout
