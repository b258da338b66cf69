import subprocess
import sys
from importlib.metadata import entry_points

pytest_plugins = "pytester"


def test_fixture_runs_the_checks(pytester):
    pytester.makepyfile(
        """
        import pytest

        def test_right(omniattn_check):
            omniattn_check("layer_norm", M=5, N=33, tensors=["weight", "bias"])

        def test_wrong(omniattn_check, monkeypatch):
            import omniattn.functional
            halved = lambda x, **kwargs: x / 2
            monkeypatch.setattr(omniattn.functional, "rms_norm", halved)
            omniattn_check("rms_norm", M=5, N=33)

        def test_missing_size(omniattn_check):
            with pytest.raises(ValueError, match="got none for"):
                omniattn_check("rms_norm", M=5)

        def normed(x, weight=None, **options):
            from omniattn import functional
            return functional.rms_norm(x, weight, **options)

        def test_right_function(omniattn_check):
            assert "gradcheck" in omniattn_check(normed, like="rms_norm", cases=["tiny"])

        def test_wrong_function(omniattn_check):
            omniattn_check(lambda x, **_: x / 2, like="rms_norm", cases=["tiny"])
        """
    )
    # An installed package brings the plugin by its entry point; a source tree on the path does not.
    installed = entry_points(group="pytest11", name="omniattn")
    result = pytester.runpytest_subprocess(*(() if installed else ("-p", "omniattn_pytest")))
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*AssertionError: rms_norm?user-M5N33?*must be within*"])
    result.stdout.fnmatch_lines(["*AssertionError: <lambda> (like rms_norm): forward (*tiny-*"])


def test_plugin_does_not_import_torch():
    code = "import sys, omniattn_pytest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
