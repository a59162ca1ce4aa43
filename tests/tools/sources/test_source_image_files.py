import io

import pytest
from PIL import Image as Picture
from test_downloads import GIVEN, SPLITS, items

from layouts import colors_match, error_of_import, error_of_training, image, obey, put
from paddle_resnet.data.formats import read_image
from paddle_resnet.data.root import DataRoot
from paddle_resnet.utils.mode import Mode

pytestmark = pytest.mark.usefixtures("convert_here", "verify_here", "cache")


def test_images_of_other_formats_become_png(tmp_path, capsys):
    """GTSRB has .ppm files."""
    endings = {"train": "ppm", "val": "PPM"}
    for split in SPLITS:
        for k, name in items(split):
            out = io.BytesIO()
            with Picture.open(io.BytesIO(image(k, int(name[:3]), "PNG"))) as picture:
                picture.save(out, "PPM")
            put(tmp_path / f"x/Images/{name}.{endings[split]}", out.getvalue())
    lines = (f"{name}.{endings[split]};{k};{split}\n" for split in SPLITS for k, name in items(split))
    put(tmp_path / "x/labels.csv", "Filename;ClassId;split\n" + "".join(lines))
    imported = obey(error_of_training(tmp_path / "x"))
    for mode, count in zip(Mode, GIVEN, strict=True):
        images = DataRoot(imported).images(mode)[1]
        assert len(images) == count
        assert colors_match(images)
        assert all(read_image(image)[0].startswith(b"\x89PNG") for image in images)
    put(tmp_path / "x/Images/000c.ppm", b"P6\n28")
    error = error_of_import(tmp_path / "x", capsys)
    assert "1 of 28 images cannot be used: Images/000c.ppm" in error
