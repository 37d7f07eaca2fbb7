//! The store against a directory and a real S3 server, each also through a gateway, and the cache
//! over both.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bases;
mod blobs;
mod cache;
mod examine;
mod figures;
mod garage;
mod leftovers;
mod outage;
mod peers;
mod resume;
mod store_proxy;
mod support;
mod trees;
