"""A picture is a whole file or none."""

import pytest
from matplotlib.figure import Figure

from deepfast.files import DataError
from deepfast.measure.pictures import figure_of, save


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_failed_drawing_leaves_the_old_picture(tmp_path, monkeypatch, ending):
    path = tmp_path / f"run.{ending}"
    figure, _ = figure_of()
    save(figure, path)
    before = path.read_bytes()

    def fail(self, file, **_):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space left"):
        save(figure, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_missing(tmp_path):
    figure, _ = figure_of()
    with pytest.raises(DataError, match="cannot be written"):
        save(figure, tmp_path / "none" / "run.svg")
