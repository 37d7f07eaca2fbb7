use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use futures::TryStreamExt;
use store::{GetError, PutError, RemoveError, StorageError, TreeManifest, TreeRemoval, TreeUsage};
use wire::{Digest, v1};

use crate::support::{MIB, Place, about, adapter, format_error_chain, noise, place, resume};

#[tokio::test]
async fn a_published_tree_is_a_plain_directory_whose_manifest_came_last() {
    let source = adapter(1, 20 * MIB);
    for at in Place::all().await {
        let tree = at.store.publish_tree(source.path(), &place(200), about()).await.unwrap();
        let digest: Digest = tree.manifest.parse().unwrap();
        let expected = format!("runs/raft-1/checkpoints/c0-s200-{}", &digest.to_hex()[..12]);
        assert_eq!(tree.path, expected);
        let dir = at.dir.join(&tree.path);
        assert_eq!(fs::read(dir.join("adapter_model.safetensors")).unwrap(), noise(1, 20 * MIB));
        let manifest = at.store.read_manifest(&tree).await.unwrap();
        let paths: Vec<_> = manifest.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(
            paths,
            ["adapter_config.json", "adapter_model.safetensors", "tokenizer/vocab.txt"]
        );
        assert_eq!(manifest.about, about());
        for line in fs::read_to_string(dir.join("B3SUMS")).unwrap().lines() {
            let (hex, path) = line.split_once("  ").unwrap();
            assert_eq!(Digest::hash_bytes(&fs::read(dir.join(path)).unwrap()).to_hex(), hex);
        }
        if let Some(server) = &at.s3 {
            let sent = server.requests().into_iter().rfind(|line| line.starts_with("PUT")).unwrap();
            assert!(sent.contains("/manifest.json"), "{sent}");
        }
    }
}

#[tokio::test]
async fn republishing_the_same_content_uploads_nothing() {
    let at = Place::s3().await;
    let first = at.store.publish_tree(adapter(1, MIB).path(), &place(1), about()).await.unwrap();
    let puts = at.count(&["PUT"]);
    let again = at.store.publish_tree(adapter(1, MIB).path(), &place(1), about()).await.unwrap();
    assert_eq!((first, at.count(&["PUT"])), (again, puts));
}

#[tokio::test]
async fn a_fetched_tree_can_be_published_again_as_the_same_tree() {
    let at = Place::file().await;
    let tree = at.store.publish_tree(adapter(1, 10).path(), &place(1), about()).await.unwrap();
    let dir = at.dir.join(&tree.path);
    assert_eq!(at.store.publish_tree(&dir, &place(1), about()).await.unwrap(), tree);
}

#[tokio::test]
async fn other_bytes_for_the_same_place_land_beside_and_not_over() {
    for at in Place::all().await {
        let one = at.store.publish_tree(adapter(1, 10).path(), &place(1), about()).await.unwrap();
        let two = at.store.publish_tree(adapter(2, 10).path(), &place(1), about()).await.unwrap();
        assert_ne!(one.path, two.path);
        for (tree, seed) in [(&one, 1), (&two, 2)] {
            let file = at.store.stream_tree_file(tree, "adapter_model.safetensors").await.unwrap();
            let bytes: Vec<_> = file.try_collect().await.unwrap();
            assert_eq!(bytes.concat(), noise(seed, 10));
        }
    }
}

#[tokio::test]
async fn a_tree_without_its_manifest_does_not_exist_and_publishing_completes_it() {
    for at in Place::all().await {
        let source = adapter(1, 10);
        let tree = at.store.publish_tree(source.path(), &place(1), about()).await.unwrap();
        let dir = at.dir.join(&tree.path);
        fs::remove_file(dir.join("manifest.json")).unwrap();
        fs::remove_file(dir.join("adapter_config.json")).unwrap();
        let absent = at.store.read_manifest(&tree).await;
        assert!(matches!(absent, Err(GetError::Storage(StorageError::Missing { .. }))));
        at.store.publish_tree(source.path(), &place(1), about()).await.unwrap();
        assert!(dir.join("adapter_config.json").exists());
        assert!(at.store.read_manifest(&tree).await.is_ok());
    }
}

#[tokio::test]
async fn a_manifest_that_is_not_the_one_asked_for_is_refused() {
    for at in Place::all().await {
        let tree = at.store.publish_tree(adapter(1, 10).path(), &place(1), about()).await.unwrap();
        let other = v1::Tree { manifest: Digest::hash_bytes(b"other").to_string(), ..tree.clone() };
        let error = at.store.read_manifest(&other).await.unwrap_err();
        assert!(matches!(error, GetError::Corrupt { .. }), "{}", format_error_chain(&error));
        assert!(
            format_error_chain(&error).contains(&other.manifest),
            "{}",
            format_error_chain(&error)
        );
        let outside = v1::Tree { path: "../x".to_owned(), ..tree };
        assert!(matches!(at.store.read_manifest(&outside).await, Err(GetError::Path(_))));
    }
}

#[tokio::test]
async fn a_manifest_that_leads_outside_is_refused_even_with_the_right_digest() {
    let at = Place::file().await;
    let digest = Digest::hash_bytes(b"secret");
    let file = serde_json::json!({"path": "../../secret", "bytes": 6, "digest": digest});
    let json = serde_json::json!({"schema": "flotilla.tree/1", "files": [file]}).to_string();
    fs::create_dir_all(at.dir.join("models/evil")).unwrap();
    fs::write(at.dir.join("models/evil/manifest.json"), &json).unwrap();
    fs::write(at.dir.join("secret"), "secret").unwrap();
    let manifest = Digest::hash_bytes(json.as_bytes()).to_string();
    let tree = v1::Tree { path: "models/evil".to_owned(), manifest };
    let error = at.store.stream_tree_file(&tree, "../../secret").await.err().unwrap();
    assert!(matches!(error, GetError::Manifest { .. }), "{}", format_error_chain(&error));
    assert!(format_error_chain(&error).contains("'..'"), "{}", format_error_chain(&error));
}

#[tokio::test]
async fn a_damaged_file_fails_at_the_end_of_its_stream() {
    for at in Place::all().await {
        let tree = at.store.publish_tree(adapter(1, 20 * MIB).path(), &place(1), about()).await;
        let tree = tree.unwrap();
        let mut bytes = noise(1, 20 * MIB);
        bytes[5] ^= 1;
        let path = at.dir.join(&tree.path).join("adapter_model.safetensors");
        fs::write(path, bytes).unwrap();
        let stream = at.store.stream_tree_file(&tree, "adapter_model.safetensors").await.unwrap();
        let error = stream.try_for_each(|_| async { Ok(()) }).await.unwrap_err();
        assert!(matches!(error, GetError::Corrupt { .. }), "{}", format_error_chain(&error));
        let absent = at.store.stream_tree_file(&tree, "model.safetensors").await.err().unwrap();
        assert!(matches!(absent, GetError::NoSuchFile { .. }), "{}", format_error_chain(&absent));
    }
}

#[tokio::test]
async fn links_to_files_are_followed_and_what_is_no_file_is_refused() {
    let at = Place::file().await;
    let source = adapter(1, 10);
    let blobs = adapter(2, 10);
    symlink(blobs.path().join("adapter_config.json"), source.path().join("link.json")).unwrap();
    let tree = at.store.publish_tree(source.path(), &place(1), about()).await.unwrap();
    assert_eq!(fs::read(at.dir.join(&tree.path).join("link.json")).unwrap(), br#"{"r": 8}"#);
    symlink(blobs.path(), source.path().join("loop")).unwrap();
    let refused = at.store.publish_tree(source.path(), &place(1), about()).await;
    assert!(matches!(refused, Err(PutError::Kind { .. })));
    let empty = tempfile::tempdir().unwrap();
    let refused = at.store.publish_tree(empty.path(), &place(1), about()).await;
    assert!(matches!(refused, Err(PutError::Empty { .. })));
    fs::write(empty.path().join("manifest.json"), "{}").unwrap();
    let refused = at.store.publish_tree(empty.path(), &place(1), about()).await;
    assert!(matches!(refused, Err(PutError::Manifest { .. })), "a stranger's file was dropped");
}

#[tokio::test]
async fn the_content_digest_ignores_the_metadata() {
    let at = Place::file().await;
    let source = adapter(1, 10);
    let mut manifests: Vec<TreeManifest> = Vec::new();
    for about in [about(), store::TreeMetadata::new()] {
        let tree = at.store.publish_tree(source.path(), &place(1), about).await.unwrap();
        manifests.push(at.store.read_manifest(&tree).await.unwrap());
    }
    assert_ne!(manifests[0], manifests[1]);
    assert_eq!(manifests[0].content_digest(), manifests[1].content_digest());
}

#[tokio::test]
async fn a_removed_tree_leaves_nothing_and_takes_nothing_else_with_it() {
    for at in Place::all().await {
        let [one, two] = [1, 2].map(|seed| adapter(seed, 20));
        let goes = at.store.publish_tree(one.path(), &resume(1), about()).await.unwrap();
        let stays = at.store.publish_tree(two.path(), &resume(1), about()).await.unwrap();
        at.store.remove_tree(&resume(1), &goes).await.unwrap();
        let absent = at.store.read_manifest(&goes).await;
        assert!(matches!(absent, Err(GetError::Storage(StorageError::Missing { .. }))));
        assert!(files_below(&at.dir.join(&goes.path)).is_empty());
        assert!(at.store.read_manifest(&stays).await.is_ok());
        assert_eq!(files_below(&at.dir.join(&stays.path)).len(), 5);
        let removed_again = at.store.remove_tree(&resume(1), &goes).await;
        assert!(removed_again.is_ok(), "{removed_again:?}");
        if let Some(server) = &at.s3 {
            // The manifest is removed before the listing.
            let requests = server.requests();
            let first = |word: &str| requests.iter().position(|line| line.contains(word)).unwrap();
            assert!(first("?delete") < first("list-type="), "{requests:#?}");
        }
    }
}

#[tokio::test]
async fn a_tree_that_was_half_removed_or_half_published_is_removed() {
    for at in Place::all().await {
        let tree = at.store.publish_tree(adapter(1, 20).path(), &resume(1), about()).await.unwrap();
        let dir = at.dir.join(&tree.path);
        for name in ["manifest.json", "adapter_config.json"] {
            fs::remove_file(dir.join(name)).unwrap();
        }
        at.store.remove_tree(&resume(1), &tree).await.unwrap();
        assert!(files_below(&dir).is_empty());
    }
}

#[tokio::test]
async fn a_removal_is_recorded_before_it_begins_and_explains_what_is_missing() {
    for at in Place::all().await {
        let admin = match &at.proxy {
            Some(_) => at.as_seen_by("ann.admin"),
            None => at.store.clone(),
        };
        let tree = at.store.publish_tree(adapter(1, 20).path(), &place(1), about()).await.unwrap();
        let whole = at.store.measure_tree(&tree).await.unwrap();
        assert!(whole.is_readable && !whole.is_marked && whole.objects == 5, "{whole:?}");
        let removal = |by: &str| TreeRemoval {
            at: "2026-01-02T03:04:05Z".into(),
            by: by.into(),
            rules: "best,last=3".into(),
        };
        admin.mark_removed(&place(1), &tree, &removal("ann")).await.unwrap();
        admin.mark_removed(&place(1), &tree, &removal("bob")).await.unwrap();
        assert!(at.store.read_manifest(&tree).await.is_ok(), "nothing is removed yet");
        assert!(at.store.require_kept(&tree).await.is_err());
        assert!(at.store.list_removed("runs/raft-1/checkpoints").await.unwrap().is_empty());
        admin.remove_tree(&place(1), &tree).await.unwrap();
        let error = at.store.read_manifest(&tree).await.unwrap_err();
        let message = format_error_chain(&error);
        assert!(message.contains("removed on 2026-01-02T03:04:05Z by ann"), "{message}");
        let left = at.store.measure_tree(&tree).await.unwrap();
        assert_eq!(left, TreeUsage { is_marked: true, ..TreeUsage::default() });
        let listed = at.store.list_removed("runs/raft-1/checkpoints").await.unwrap();
        assert_eq!(listed, std::slice::from_ref(&tree.path));
        let examined = at.store.examine_tree(&tree).await.unwrap();
        assert_eq!((examined.defects, examined.removal), (vec![], Some(removal("ann"))));
        admin.unmark_removed(&place(1), &tree).await.unwrap();
        let absent = at.store.read_manifest(&tree).await;
        assert!(matches!(absent, Err(GetError::Storage(StorageError::Missing { .. }))));
    }
}

#[tokio::test]
async fn a_fact_cannot_have_a_tree_of_another_place_removed() {
    for at in Place::all().await {
        let tree = at.store.publish_tree(adapter(1, 10).path(), &place(1), about()).await.unwrap();
        let refused = at.store.remove_tree(&place(2), &tree).await;
        assert!(matches!(refused, Err(RemoveError::WrongPlace { .. })), "{refused:?}");
        let above = v1::Tree { path: "runs".to_owned(), ..tree.clone() };
        let refused = at.store.remove_tree(&place(1), &above).await;
        assert!(matches!(refused, Err(RemoveError::WrongPlace { .. })), "{refused:?}");
        assert!(at.store.read_manifest(&tree).await.is_ok());
    }
}

/// Lists all files below a directory; none when it does not exist.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}
