import os
import subprocess
import sys

import pytest

from conftest import ROOT
from utils import cache

STRANGER = 54321


@pytest.fixture
def home(monkeypatch, tmp_path):
    """The cache's place; a private folder, once made, is made anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache._private_folder.cache_clear()
    return tmp_path / "paddle_resnet"


def give_away(path, monkeypatch):
    """Let a path belong to another user than this process."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def test_the_folder_is_made_and_only_its_owner_can_write_to_it(home):
    umask = os.umask(0)
    try:
        assert cache.folder() == home
    finally:
        os.umask(umask)
    assert home.stat().st_mode & 0o777 == 0o755
    assert cache.folder() == home


@pytest.mark.parametrize("fault", ["another user's", "group", "others", "a link to another user's"])
def test_a_folder_that_others_can_write_to_is_not_used(home, monkeypatch, tmp_path, capsys, fault):
    place = home
    if "link" in fault:
        place = tmp_path / "elsewhere"
        home.symlink_to(place)
    place.mkdir()
    if "user" in fault:
        give_away(place, monkeypatch)
    else:
        place.chmod(0o770 if fault == "group" else 0o1777)
    private = cache.folder()
    assert private != home
    assert private.stat().st_mode & 0o777 == 0o700
    said = capsys.readouterr().err
    assert f"cache {home}: belongs to another user or is writable by others" in said
    assert "set XDG_CACHE_HOME" in said
    assert cache.folder() == private  # said and made once
    assert capsys.readouterr().err == ""


def test_the_private_folder_goes_with_the_process(home):
    home.mkdir()
    home.chmod(0o777)
    code = "from utils import cache; (cache.folder() / 'file').touch(); print(cache.folder())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "paddle_resnet-" in done.stdout
    assert not os.path.exists(done.stdout.strip())


def test_a_cache_of_root_is_as_good_as_ones_own(home, monkeypatch):
    """As in a container image that is filled by root and run by a user."""
    home.mkdir()
    home.chmod(0o555)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    else:
        root = os.stat_result((0o40555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        monkeypatch.setattr(os, "stat", lambda path, **options: root)
    assert cache.folder() == home


def test_a_place_that_cannot_be_made_is_left_to_those_who_write_there(home):
    home.write_text("in the way")
    assert cache.folder() == home
