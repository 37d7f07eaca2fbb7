use std::fs;

use store::ObjectDefect;
use wire::{Digest, v1};

use crate::support::{MIB, Place, about, adapter, place};

fn brief(flaws: &[ObjectDefect], at: &Place) -> Vec<String> {
    let inside = |flaw: &ObjectDefect| flaw.url.strip_prefix(at.store.url()).unwrap().to_owned();
    let name = |flaw: &ObjectDefect| inside(flaw).rsplit('/').next().unwrap().to_owned();
    flaws.iter().map(|flaw| format!("{} {}", name(flaw), flaw.problem)).collect()
}

#[tokio::test]
async fn what_is_missing_short_or_extra_in_a_tree_shows_without_reading_it() {
    for at in Place::all().await {
        let source = adapter(1, 2 * MIB);
        let tree = at.store.publish_tree(source.path(), &place(1), about()).await.unwrap();
        let examined = at.store.examine_tree(&tree).await.unwrap();
        assert_eq!(examined.defects, []);
        let manifest = examined.manifest.unwrap();
        assert_eq!(manifest, at.store.read_manifest(&tree).await.unwrap());

        let dir = at.dir.join(&tree.path);
        fs::remove_file(dir.join("adapter_config.json")).unwrap();
        fs::File::options()
            .write(true)
            .open(dir.join("adapter_model.safetensors"))
            .and_then(|file| file.set_len(5))
            .unwrap();
        fs::write(dir.join("stranger"), "x").unwrap();
        let examined = at.store.examine_tree(&tree).await.unwrap();
        assert_eq!(
            brief(&examined.defects, &at),
            [
                "adapter_config.json is not there",
                "adapter_model.safetensors has another size",
                "stranger is in no manifest"
            ]
        );
        assert_eq!(examined.defects[1].found.as_deref(), Some("5 bytes"));

        fs::write(dir.join("manifest.json"), "{}").unwrap();
        let examined = at.store.examine_tree(&tree).await.unwrap();
        assert_eq!(brief(&examined.defects, &at), ["manifest.json is damaged"]);
        assert!(examined.defects[0].expected.as_ref().unwrap().contains(&tree.manifest));
        fs::remove_dir_all(&dir).unwrap();
        let examined = at.store.examine_tree(&tree).await.unwrap();
        assert_eq!(brief(&examined.defects, &at), ["manifest.json is not there"]);
    }
}

#[tokio::test]
async fn a_changed_bit_shows_when_the_bytes_are_hashed_with_both_digests() {
    for at in Place::all().await {
        let source = adapter(1, 2 * MIB);
        let tree = at.store.publish_tree(source.path(), &place(1), about()).await.unwrap();
        let manifest = at.store.read_manifest(&tree).await.unwrap();
        let file = manifest.find_file("adapter_model.safetensors").unwrap();
        let seen = std::sync::atomic::AtomicU64::new(0);
        let count = |bytes| {
            seen.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
        };
        assert_eq!(at.store.hash_tree_file(&tree, file, &count).await.unwrap(), None);
        assert_eq!(seen.into_inner(), file.bytes);
        assert_eq!(at.store.hash_sums(&tree, &manifest).await.unwrap(), None);

        let path = at.dir.join(&tree.path).join("adapter_model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        bytes[MIB] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(at.store.examine_tree(&tree).await.unwrap().defects, []);
        let flaw = at.store.hash_tree_file(&tree, file, &|_| ()).await.unwrap().unwrap();
        assert!(flaw.url.ends_with("/adapter_model.safetensors"), "{flaw:?}");
        assert!(flaw.expected.unwrap().contains(&file.digest.to_string()));
        assert_eq!(flaw.found.unwrap(), Digest::hash_bytes(&bytes).to_string());
    }
}

#[tokio::test]
async fn a_blob_is_examined_by_size_and_hashed_when_asked() {
    for at in Place::all().await {
        let blob = at.store.put_blob("four".into()).await.unwrap();
        assert_eq!(at.store.examine_blob(&blob).await.unwrap(), None);
        assert_eq!(at.store.hash_blob(&blob, &|_| ()).await.unwrap(), None);
        let hex = blob.digest.strip_prefix("b3:").unwrap();
        let path = at.dir.join("blobs").join(&hex[..2]).join(hex);
        fs::write(&path, "five").unwrap();
        assert_eq!(at.store.examine_blob(&blob).await.unwrap(), None);
        let flaw = at.store.hash_blob(&blob, &|_| ()).await.unwrap().unwrap();
        assert_eq!(flaw.problem, "is damaged");
        fs::write(&path, "fours").unwrap();
        let flaw = at.store.examine_blob(&blob).await.unwrap().unwrap();
        assert_eq!((flaw.problem, flaw.found.as_deref()), ("has another size", Some("5 bytes")));
        fs::remove_file(&path).unwrap();
        let flaw = at.store.examine_blob(&blob).await.unwrap().unwrap();
        assert_eq!(flaw.problem, "is not there");
        let nameless = v1::Blob { digest: "x".into(), bytes: 1 };
        let flaw = at.store.examine_blob(&nameless).await.unwrap().unwrap();
        assert!(flaw.found.unwrap().contains("64 hex"));
    }
}
