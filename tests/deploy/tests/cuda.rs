//! The program with kernels for NVIDIA's GPUs.

use std::process::Command;

use deploy::{output_text, root, run_command};
use requirements::{find_program, skip_test};

#[test]
fn the_program_compiles_with_kernels_for_nvidia() {
    if find_program("nvcc").is_none() {
        skip_test("nvcc", "install NVIDIA's CUDA toolkit");
        return;
    }
    let cargo = option_env!("CARGO").unwrap_or("cargo");
    let mut command = Command::new(cargo);
    command.args(["check", "--package", "flotilla", "--features", "cuda", "--target-dir"]);
    // Without a GPU to ask, the kernels' build needs a target.
    let has_gpu = Command::new("nvidia-smi").output().is_ok_and(|output| output.status.success());
    if !has_gpu && std::env::var_os("CUDA_COMPUTE_CAP").is_none() {
        command.env("CUDA_COMPUTE_CAP", "80");
    }
    // The build of the tests holds the lock of its own directory.
    let output = run_command(command.arg(root().join("target/cuda")).current_dir(root()));
    assert!(output.status.success(), "{}", output_text(&output));
}
