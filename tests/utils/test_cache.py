import os
import subprocess
import sys

import pytest

from conftest import ROOT
from paddle_resnet.utils import cache

OTHER_USER = 54321


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Return the path of a new cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paddle_resnet"


def change_owner(path, monkeypatch):
    """Change the owner of a path to a user other than the one that runs this process."""
    if os.geteuid() == 0:
        os.chown(path, OTHER_USER, OTHER_USER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)


def test_created_cache_is_writable_only_by_owner(home):
    umask = os.umask(0)
    try:
        assert cache.folder() == home
    finally:
        os.umask(umask)
    assert home.stat().st_mode & 0o777 == 0o755
    assert cache.folder() == home


@pytest.mark.parametrize("value", [None, ""])
def test_default_cache_is_in_home_folder(environment, tmp_path, value):
    environment(HOME=str(tmp_path))
    environment(XDG_CACHE_HOME=None)
    if value is not None:
        environment(XDG_CACHE_HOME=value)
    assert cache.folder() == tmp_path / ".cache/paddle_resnet"


@pytest.mark.parametrize("fault", ["another user's", "group", "others", "a link to another user's"])
def test_cache_writable_by_others_is_not_used(home, monkeypatch, tmp_path, capsys, fault):
    place = home
    if "link" in fault:
        place = tmp_path / "elsewhere"
        home.symlink_to(place)
    place.mkdir()
    if "user" in fault:
        change_owner(place, monkeypatch)
    else:
        place.chmod(0o770 if fault == "group" else 0o1777)
    private = cache.folder()
    assert private != home
    assert private.stat().st_mode & 0o777 == 0o700
    stderr = capsys.readouterr().err
    assert f"cache {home}: belongs to another user or is writable by other users" in stderr
    assert "set XDG_CACHE_HOME" in stderr
    assert cache.folder() == private  # the second call logs no warning and returns the same folder
    assert capsys.readouterr().err == ""


def test_private_folder_is_deleted_at_exit(home):
    home.mkdir()
    home.chmod(0o777)
    code = "from utils import cache; (cache.folder() / 'file').touch(); print(cache.folder())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "paddle_resnet-" in done.stdout
    assert not os.path.exists(done.stdout.strip())


def test_cache_owned_by_root_is_used(home, monkeypatch):
    """Root may have filled the cache of a container image before another user runs the container."""
    home.mkdir()
    home.chmod(0o555)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    else:
        root = os.stat_result((0o40555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        monkeypatch.setattr(os, "stat", lambda path, **options: root)
    assert cache.folder() == home


def test_uncreatable_cache_path_is_returned_unchanged(home):
    home.write_text("in the way")
    assert cache.folder() == home
