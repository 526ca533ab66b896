"""The rule for missing packages in tests/conftest.py."""


def test_a_missing_package_fails_in_ci(tmp_path, python):
    (tmp_path / "test_module.py").write_text(
        "import pytest; pytest.importorskip('no_such_package.part')\ndef test(): pass\n"
    )
    (tmp_path / "test_body.py").write_text(
        "import pytest\ndef test(): pytest.importorskip('no_such_package.part')\n"
    )
    (tmp_path / "test_other.py").write_text("import pytest\ndef test(): pytest.skip('other')\n")
    run = python(
        *("-m", "pytest", "-p", "tests.conftest", "-c", "/dev/null", str(tmp_path)),
        "--continue-on-collection-errors", check=False, CI="true",
    )  # fmt: skip
    assert "1 failed, 1 skipped, 1 error" in run.stdout
