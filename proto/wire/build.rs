//! Generates the message types and their canonical JSON from `proto/flotilla/v1`.

use std::{env, fs, path::PathBuf};

use prost::Message;

const PROTO_FILES: [&str; 6] = [
    "flotilla/v1/common.proto",
    "flotilla/v1/facts.proto",
    "flotilla/v1/fleet.proto",
    "flotilla/v1/board.proto",
    "flotilla/v1/control.proto",
    "flotilla/v1/members.proto",
];

/// pbjson's number reader in the generated code, which the faster `crate::number::Number` replaces.
const PBJSON_NUMBER_TYPE: &str = "::pbjson::private::NumberDeserialize";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../flotilla");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let descriptors = protox::compile(PROTO_FILES, [".."])?;
    let encoded = descriptors.encode_to_vec();
    fs::write(out.join("flotilla.bin"), &encoded)?;

    prost_build::Config::new()
        .btree_map(["."])
        .compile_well_known_types()
        .extern_path(".google.protobuf", "::pbjson_types")
        .compile_fds(descriptors)?;
    // Ignore fields of a newer version and treat its unknown enum values as unset, so that hosts
    // one version apart can work together.
    pbjson_build::Builder::new()
        .register_descriptors(&encoded)?
        .btree_map(["."])
        .ignore_unknown_fields()
        .ignore_unknown_enum_variants()
        .build(&[".flotilla"])?;
    let serde = out.join("flotilla.v1.serde.rs");
    let generated = fs::read_to_string(&serde)?;
    fs::write(&serde, generated.replace(PBJSON_NUMBER_TYPE, "crate::number::Number"))?;
    Ok(())
}
