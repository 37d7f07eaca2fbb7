//! The store against a directory and against a real S3 server, and the cache over both.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bases;
mod blobs;
mod cache;
mod examine;
mod outage;
mod support;
mod trees;
