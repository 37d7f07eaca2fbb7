//! Generates servers and clients of the services in `proto/`; their messages are `wire::v1`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../../proto/flotilla");
    let descriptors = protox::compile(
        ["flotilla/v1/control.proto", "flotilla/v1/members.proto"],
        ["../../proto"],
    )?;
    tonic_prost_build::configure()
        .extern_path(".flotilla.v1", "::wire::v1")
        .compile_fds(descriptors)?;
    Ok(())
}
