//! Auditing over gRPC.

use tonic::Code;
use wire::v1;

use crate::rig::Rig;

#[tokio::test]
async fn an_audit_names_what_is_wrong_in_the_log_and_in_the_store() {
    let rig = Rig::start().await;
    let run = rig.submit().await;
    let audit = async |no_store| {
        let request = v1::AuditRequest { run: run.clone(), no_store };
        rig.runs().audit(request).await.unwrap().into_inner()
    };
    let clean = audit(false).await;
    assert_eq!(clean.findings, []);
    assert_eq!((clean.facts, &*clean.checked), (1, &["lineage".to_owned(), "files".into()][..]));

    let at = rig.finish(&run).await;
    let blobs = rig.dir.path().join("store/blobs");
    let mut all = walk(&blobs);
    std::fs::write(all.remove(0), "longer than anything that was stored here").unwrap();
    let findings = audit(false).await.findings;
    let told: Vec<&str> = findings.iter().map(|finding| &*finding.what).collect();
    assert_eq!(told, ["the run's facts do not show that it succeeded", "has another size"]);
    assert_eq!((&*findings[0].r#where, findings[0].sequence), ("log", at));
    assert_eq!(findings[0].subject, format!("flotilla.{run}.done"));
    assert_eq!(findings[1].r#where, "store");
    assert!(findings[1].url.contains("/blobs/"), "{findings:?}");
    assert_eq!(audit(true).await.findings.len(), 1);

    let nobody = v1::AuditRequest { run: "nobody-1".into(), no_store: false };
    assert_eq!(rig.runs().audit(nobody).await.unwrap_err().code(), Code::NotFound);
}

fn walk(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}
