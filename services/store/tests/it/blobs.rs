use std::fs;

use bytes::Bytes;
use store::{CheckError, GetError, PutError, StorageError, Store};
use wire::{Digest, v1};

use crate::support::{MIB, Place, format_error_chain, noise};

#[tokio::test]
async fn a_blob_reads_back_and_is_uploaded_once() {
    for at in Place::all().await {
        at.store.check_access().await.unwrap();
        for len in [0, 1, 3 * MIB] {
            let bytes = Bytes::from(noise(1, len));
            let blob = at.store.put_blob(bytes.clone()).await.unwrap();
            assert_eq!(blob.digest, Digest::hash_bytes(&bytes).to_string());
            assert_eq!(at.store.get_blob(&blob, u64::MAX).await.unwrap(), bytes);
            let puts = at.count(&["PUT"]);
            assert_eq!(at.store.put_blob(bytes).await.unwrap(), blob);
            assert_eq!(at.count(&["PUT"]), puts);
        }
    }
}

#[tokio::test]
async fn a_file_larger_than_a_part_goes_and_comes_in_parts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    let bytes = noise(2, 40 * MIB + 1);
    fs::write(&path, &bytes).unwrap();
    for at in Place::all().await {
        let blob = at.store.put_blob_file(&path).await.unwrap();
        assert_eq!(blob.bytes, bytes.len() as u64);
        assert_eq!(at.store.get_blob(&blob, u64::MAX).await.unwrap(), bytes);
        if at.s3.is_some() {
            assert_eq!(at.count(&["PUT", "partNumber"]), 3);
            assert_eq!(at.count(&["GET", "/blobs/"]), 3);
        }
        assert_eq!(at.store.put_blob_file(&path).await.unwrap(), blob);
        assert!(at.count(&["PUT", "partNumber"]) <= 3, "it was uploaded again");
    }
}

#[tokio::test]
async fn a_blob_over_the_limit_is_refused_before_it_is_read() {
    let at = Place::s3().await;
    let blob = at.store.put_blob(Bytes::from_static(b"12345")).await.unwrap();
    let gets = at.count(&["GET"]);
    let refused = at.store.get_blob(&blob, 4).await;
    assert!(matches!(refused, Err(GetError::TooLarge { bytes: 5, limit: 4, .. })));
    // A fact cannot understate the size.
    let understated = v1::Blob { bytes: 3, ..blob.clone() };
    assert!(matches!(at.store.get_blob(&understated, 4).await, Err(GetError::Corrupt { .. })));
    assert_eq!(at.count(&["GET"]), gets + 1);
    assert!(at.store.get_blob(&blob, 5).await.is_ok());
}

#[tokio::test]
async fn the_error_of_a_damaged_truncated_or_missing_object_names_its_url() {
    for at in Place::all().await {
        for len in [100, 20 * MIB] {
            let bytes = noise(3, len);
            let blob = at.store.put_blob(bytes.clone().into()).await.unwrap();
            let hex = blob.digest.strip_prefix("b3:").unwrap();
            let key = format!("blobs/{}/{hex}", &hex[..2]);
            let mut damaged = bytes.clone();
            damaged[len - 1] ^= 1;
            for bad in [&damaged[..], &bytes[..len - 1]] {
                fs::write(at.dir.join(&key), bad).unwrap();
                let error = at.store.get_blob(&blob, u64::MAX).await.unwrap_err();
                assert!(
                    matches!(error, GetError::Corrupt { .. }),
                    "{}",
                    format_error_chain(&error)
                );
                for word in [at.store.url(), &key, &blob.digest, "publish it again"] {
                    assert!(
                        format_error_chain(&error).contains(word),
                        "no {word:?} in {}",
                        format_error_chain(&error)
                    );
                }
                assert!(!error.is_transient());
            }
            fs::remove_file(at.dir.join(&key)).unwrap();
            let error = at.store.get_blob(&blob, u64::MAX).await.unwrap_err();
            assert!(
                matches!(error, GetError::Storage(StorageError::Missing { .. })),
                "{}",
                format_error_chain(&error)
            );
        }
    }
}

#[tokio::test]
async fn a_digest_that_is_none_is_refused() {
    let at = Place::file().await;
    let blob = v1::Blob { digest: "../../etc/passwd".to_owned(), bytes: 1 };
    assert!(matches!(at.store.get_blob(&blob, 9).await, Err(GetError::Digest(_))));
}

#[tokio::test]
async fn wrong_keys_are_a_refusal_at_once_and_not_an_outage() {
    let at = Place::s3().await;
    let server = at.s3.as_ref().unwrap();
    let mut env = server.env();
    env.insert("AWS_SECRET_ACCESS_KEY".to_owned(), "wrong".to_owned());
    let stranger = Store::open_with_env(&server.url(), env).await.unwrap();
    let error = stranger.put_blob(Bytes::from_static(b"x")).await.unwrap_err();
    assert!(
        matches!(error, PutError::Storage(StorageError::Denied { .. })),
        "{}",
        format_error_chain(&error)
    );
    assert!(
        format_error_chain(&error).contains("AWS_ACCESS_KEY_ID"),
        "{}",
        format_error_chain(&error)
    );
    assert!(matches!(
        stranger.check_access().await,
        Err(CheckError::Storage(StorageError::Denied { .. }))
    ));
}

#[tokio::test]
async fn a_file_where_a_directory_should_be_fails_with_its_address() {
    let at = Place::file().await;
    fs::write(at.dir.join("blobs"), "").unwrap();
    let error = at.store.put_blob(Bytes::from_static(b"x")).await.unwrap_err();
    assert!(format_error_chain(&error).contains(at.store.url()), "{}", format_error_chain(&error));
    let inside = format!("file://{}/blobs", at.dir.display());
    assert!(Store::open(&inside).await.is_err());
}

#[tokio::test]
async fn a_server_that_does_not_answer_fails_its_check_soon() {
    let mut at = Place::s3().await;
    at.s3.as_mut().unwrap().kill();
    tokio::time::pause();
    let error = at.store.check_access().await.unwrap_err();
    assert!(matches!(error, CheckError::Silent { .. }), "{}", format_error_chain(&error));
}
