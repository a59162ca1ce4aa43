"""Tests of benchmarks/networks.py on the CPU."""

import importlib.util
import json
import re
import subprocess

import paddle
import pytest
from paddle import static

from conftest import ROOT
from paddle_resnet.native import build as native

spec = importlib.util.spec_from_file_location("networks", ROOT / "benchmarks" / "networks.py")
networks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(networks)


def parse(*arguments):
    return networks.parse_args([*map(str, arguments)])


def test_bytes_of_small_program():
    main = static.Program()
    with static.program_guard(main, static.Program()):
        x = static.data("x", [None, 4, 4, 8], "float16")
        y = paddle.nn.functional.relu(x)
        paddle.reshape(y, [0, 128])  # moves no data
        z = paddle.add_n([y, x, x])  # reads x once
        mask, copy = (static.data(name, z.shape, "uint8") for name in ("z.mask", "copy"))
        paddle.assign(mask, copy)
        state = static.data("state", [3], "float32")
        main.global_block().append_op(type="relu", inputs={"X": state}, outputs={"Out": state})  # in place
    elements = 5 * 4 * 4 * 8
    relu, add_n, copied, update = 2 * 2 * elements, 3 * 2 * elements, elements // 8 + elements, 2 * 3 * 4
    assert networks.bytes_moved(main, 5) == relu + add_n + copied + update


def test_gradient_of_addition_reads_only_gradient_of_its_output():
    main = static.Program()
    with static.program_guard(main, static.Program()):
        x, y, gradient = (static.data(name, [None, 6]) for name in ("x", "y", "gradient"))
        x.stop_gradient = y.stop_gradient = False
        static.gradients(paddle.add(x, y), [x, y], gradient)
    assert [op.type for op in main.global_block().ops] == ["elementwise_add", "elementwise_add_grad"]
    assert networks.bytes_moved(main, 2) == 2 * 3 * (2 * 6 * 4)


def test_every_custom_kernel_has_a_kind():
    command = [*native._compiler(), "-E", "-P", "-x", "c++", "-D__CUDACC_RTC__", "-D__CUDA_ARCH__=900", "-"]
    source = subprocess.run(command, input=native._kernel_source(), capture_output=True, text=True, check=True).stdout
    kernels = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\(", source)
    assert len(kernels) == source.count("__global__")
    kinds = {
        "bn": "BN, activation, addition",
        "affine": "BN, activation, addition",
        "dropout": "BN, activation, addition",
        "max": "pooling",
        "average": "pooling",
        "stem": "convolution",
        "image": "SE, concatenation",
        "scale": "SE, concatenation",
        "sigmoid": "SE, concatenation",
        "concat": "SE, concatenation",
        "split": "SE, concatenation",
        "depthwise": "depthwise",
        "pointwise": "custom 1x1 convolution",
        "loss": "loss, metrics",
    }
    expected = {kernel: kinds.get(kernel.partition("_")[0], "update") for kernel in kernels}
    assert {kernel: networks.kind_of(kernel) for kernel in kernels} == expected
    assert set(kinds.values()) < set(expected.values())


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("sm90_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cudnn", "convolution"),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_relu_f16_stages_32x6_tn", "convolution"),
        ("cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816wgrad_optimized_f16_128x64_nhwc>", "convolution"),
        ("implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false>", "convolution"),
        ("cublasLt::splitKreduce_kernel<32, 16, int, __half>", "convolution"),
        ("cudnn::cnn::conv2d_c1_k1_nhwc_kernel<__half, float, 3, 1>", "depthwise"),
        ("cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512>", "BN, activation, addition"),
        ("cudnn::batchnorm_bwtr_nhwc_semiPersist<__half, float>", "BN, activation, addition"),
        ("phi::funcs::VectorizedElementwiseKernel<phi::float16, phi::funcs::CastFunctor<float>>", "casts, copies"),
        ("phi::funcs::VectorizedBroadcastKernel<phi::float16, AddFunctor>", "BN, activation, addition"),
        ("cudnn::ops::nchwToNhwcKernel<__half, __half, float, true, false>", "casts, copies"),
        ("cudnn::pooling_bw_4d_kernel<__half, float>", "pooling"),
        ("MEMCPY_DtoH", "casts, copies"),
        ("unknown_kernel", "other"),
    ],
)
def test_kinds_of_library_kernels(kernel, kind):
    assert networks.kind_of(kernel) == kind


def test_kernel_times_are_summed_without_durations_in_names():
    events = [
        {"cat": "Kernel", "name": "void f<float [3]>(int)[666.660 us]", "dur": 666.66},
        {"cat": "Kernel", "name": "void f<float [3]>(int)[1.340 us]", "dur": 1.34},
        {"cat": "Memset", "name": "MEMSET[2.000 us]", "dur": 2.0},
        {"cat": "Memcpy", "name": "MEMCPY_DtoH[3.000 us]", "dur": 3.0},
        {"cat": "Operator", "name": "conv2d[9.000 us]", "dur": 9.0},
        {"name": "process_name"},
    ]
    times = networks.kernel_times(json.dumps({"traceEvents": events}))
    assert times == pytest.approx({"f<float [3]>(int)": 0.668, "MEMSET": 0.002, "MEMCPY_DtoH": 0.003})


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_results_of_a_tiny_network(tmp_path, device):
    output = tmp_path / "networks.jsonl"
    flags = ["--device", device, "--crop-size", "32", "--batch-size", "4", "--steps", "2", "--warmup-steps", "6"]
    networks.measure_all(parse(*flags, "--output", output), "Tiny")
    evaluated, trained = map(json.loads, output.read_text().splitlines())
    assert (evaluated["task"], trained["task"]) == ("evaluate", "train")
    for result in (evaluated, trained):
        assert (result["arch"], result["steps"], result["batch_size"]) == ("Tiny", 2, 4)
        assert result["ips"] > 0
        assert result["is_captured"] == (device == "gpu")
        kinds = {networks.kind_of(kernel) for kernel in result["kernels"]}
        if device == "gpu":
            assert {"BN, activation, addition", "convolution", "loss, metrics"} <= kinds
        else:
            assert not kinds
    image = 4 * 32 * 32 * 4 * (2 if device == "gpu" else 4)
    assert image < evaluated["bytes"] < trained["bytes"] / 2


def test_table_contains_latest_results():
    gpu = {"batch_size": 256, "is_captured": True, "peak_memory_allocated_mib": 2486.0, "bytes": 24e9}
    gpu |= {"kernels": {"bn_apply_f16": 6.0, "MEMCPY_DtoH": 1.0, "sm90_xmma_fprop": 2.5, "unknown": 0.5}}
    cpu = {"batch_size": 4, "is_captured": False, "bytes": 48e6, "kernels": {}}
    results = [
        {"arch": "ResNet18", "task": "evaluate", "ips": 40.0, **cpu},
        {"arch": "ResNet18", "task": "train", "ips": 1.0, **cpu},
        {"arch": "ResNet34", "task": "train", "ips": 1.0, **cpu},
        {"arch": "ResNet18", "task": "train", "ips": 25600.0, **gpu},
    ]
    header, _, *rows = networks.table(results, 4.8).splitlines()
    names, *cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (header, *rows)]
    assert cells.pop(1)[:2] == ["ResNet34 (not captured)", "train"]
    train, evaluate = (dict(zip(names, row, strict=True)) for row in cells)
    assert cells[0][:8] == ["ResNet18", "train", "25,600", "2,486", "10.00", "10.00", "5.00", "50%"]
    assert cells[1][:8] == ["ResNet18 (not captured)", "evaluate", "40", "", "100.00", "", "0.01", "0%"]
    assert train["BN, activation, addition"] == "60%" and train["convolution"] == "25%"
    assert train["casts, copies"] == "10%" and train["other"] == "5%" and train["depthwise"] == "0%"
    assert evaluate["convolution"] == ""


def test_failed_network_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    def run(command, **_):
        assert "--batch-size=256" in command and "None" not in str(command)
        arch = command[command.index("--arch") + 1]
        return subprocess.CompletedProcess(command, int(arch == "GhostNet"), "", "a line\nout of memory\n")

    monkeypatch.setattr(networks.subprocess, "run", run)
    args = parse("--arch", "GhostNet", "--arch", "ResNet18", "--output", tmp_path / "x.jsonl")
    assert networks.run(args) == 1
    assert sorted(capsys.readouterr().err.splitlines()) == ["GhostNet: out of memory", "ResNet18: measured"]


def test_too_few_warmup_steps_are_an_error():
    assert parse().arch == list(networks.MODELS)
    with pytest.raises(SystemExit):
        parse("--warmup-steps", "5")
