"""Names and opening of files; what commands make of unusable ones is in the tests of the commands."""

import pytest

from utils import files


def test_a_file_may_have_the_size_of_the_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"four")
    with files.open_regular(tmp_path / "file", 4) as file:
        assert file.read() == b"four"
    with pytest.raises(OSError) as error:
        files.open_regular(tmp_path / "file", 3)
    assert error.value.strerror == "4 bytes, where 3 are the limit"
