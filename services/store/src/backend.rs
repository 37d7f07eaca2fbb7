//! Object storage behind a store URL. Only `AWS_*` is read from the environment, and timeouts and
//! retries fit large files.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use object_store::{
    ClientOptions, ObjectStore, ObjectStoreExt,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
    local::LocalFileSystem,
    path::Path,
    prefix::PrefixStore,
};

use crate::{
    blocking::run_blocking,
    error::{OpenError, StorageError},
    gateway_store::{GatewayObjectStore, GatewayStore},
    path::RelativePath,
    request_settings::{CONNECT_TIMEOUT, REQUEST_TIMEOUT, retry_config},
    staged_file::link_file,
};
use wire::Digest;

/// The storage behind a [`Store`](crate::Store): a directory, an S3 bucket or a gateway. `objects`
/// reaches all three kinds; exactly one of `local`, `bucket` and `gateway` is set and gives access
/// to operations of that kind alone.
pub(crate) struct StoreBackend {
    pub(crate) url: String,
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// The directory, for reads that bypass `object_store`'s slow local stream.
    pub(crate) local: Option<LocalFileSystem>,
    /// The bucket, for operations that only S3 supports: signed URLs and resumable uploads.
    pub(crate) bucket: Option<S3Bucket>,
    pub(crate) gateway: Option<GatewayObjectStore>,
    /// The directory of upload journals.
    pub(crate) journal_dir: Option<PathBuf>,
    /// Keys of large tree files that this process uploaded lately: the next tree may contain them.
    pub(crate) recent_files: Mutex<BTreeMap<Digest, Path>>,
}

#[derive(Debug)]
pub(crate) struct S3Bucket {
    pub(crate) s3: AmazonS3,
    prefix: Path,
}

impl S3Bucket {
    pub(crate) fn full_key(&self, key: &Path) -> Path {
        self.prefix.parts().chain(key.parts()).collect()
    }
}

impl StoreBackend {
    pub(crate) fn object_url(&self, key: &Path) -> String {
        format!("{}/{key}", self.url)
    }

    /// Copies an object within the store; in a directory the copy is a hard link.
    pub(crate) async fn copy(&self, from: &Path, to: &Path) -> object_store::Result<()> {
        match &self.local {
            None => self.objects.copy(from, to).await,
            Some(local) => {
                let (from_file, to_file) =
                    (local.path_to_filesystem(from)?, local.path_to_filesystem(to)?);
                let linked = run_blocking(move || link_file(&from_file, &to_file)).await;
                linked.map_err(|source| object_store::Error::Generic {
                    store: "LocalFileSystem",
                    source: Box::new(source),
                })
            }
        }
    }

    pub(crate) fn storage_error(&self, key: &Path, source: object_store::Error) -> StorageError {
        StorageError::new(self.object_url(key), source)
    }
}

pub(crate) async fn open_backend(
    url: &str,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<StoreBackend, OpenError> {
    let url = url.trim_end_matches('/');
    match url.split_once("://") {
        Some(("file", dir)) => open_directory(url, dir).await,
        Some(("s3", place)) => open_bucket(url, place, env),
        Some((scheme, _)) => {
            let reason = format!("{scheme:?} is not supported, use file:// or s3://");
            Err(url_error(url, reason))
        }
        None if url.starts_with('/') => Err(url_error(url, format!("write it as file://{url}"))),
        None => {
            Err(url_error(url, "write file:///absolute/directory or s3://bucket/prefix".to_owned()))
        }
    }
}

pub(crate) fn open_gateway(gateway: &GatewayStore) -> Result<StoreBackend, OpenError> {
    let objects = GatewayObjectStore::new(gateway)?;
    let (url, gateway) = (gateway.store_url(), Some(objects.clone()));
    let journals = journal_directory(|name| std::env::var_os(name));
    Ok(StoreBackend {
        url,
        objects: Arc::new(objects),
        local: None,
        bucket: None,
        gateway,
        journal_dir: journals,
        recent_files: Mutex::default(),
    })
}

/// Returns the directory of upload journals, below `XDG_CACHE_HOME` or `.cache` in `HOME`.
fn journal_directory(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    cache.is_absolute().then(|| cache.join("flotilla/uploads"))
}

fn url_error(url: &str, reason: String) -> OpenError {
    OpenError::Url { url: url.to_owned(), reason }
}

async fn open_directory(url: &str, dir: &str) -> Result<StoreBackend, OpenError> {
    if !dir.starts_with('/') {
        return Err(url_error(
            url,
            "a directory must be absolute: file:///srv/flotilla".to_owned(),
        ));
    }
    let path = PathBuf::from(dir);
    let failed = |source| OpenError::Directory { path: path.clone(), source };
    let created = path.clone();
    let created = run_blocking(move || durable_files::create_directory(&created, 0o777)).await;
    created.map_err(failed)?;
    let settings = |source| OpenError::Settings { url: url.to_owned(), source: Box::new(source) };
    let local = LocalFileSystem::new_with_prefix(&path).map_err(settings)?.with_fsync(true);
    let objects = Arc::new(local.clone());
    let (local, bucket, gateway, journals) = (Some(local), None, None, None);
    Ok(StoreBackend {
        url: url.to_owned(),
        objects,
        local,
        bucket,
        gateway,
        journal_dir: journals,
        recent_files: Mutex::default(),
    })
}

fn open_bucket(
    url: &str,
    place: &str,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<StoreBackend, OpenError> {
    let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    if bucket.is_empty() || !bucket.bytes().all(legal) {
        let reason = "a bucket's name has letters, digits, '-' and '.': s3://bucket/prefix (keys \
                      and the server's address come from AWS_*)";
        return Err(url_error(url, reason.to_owned()));
    }
    if !prefix.is_empty() {
        RelativePath::new(prefix).map_err(|error| url_error(url, error.to_string()))?;
    }
    let prefix = Path::parse(prefix).map_err(|error| url_error(url, error.to_string()))?;
    let settings = |source| OpenError::Settings { url: url.to_owned(), source: Box::new(source) };
    let env: Vec<(String, String)> = env.into_iter().collect();
    let variable = |name: &str| env.iter().find(|(known, _)| known == name);
    let journals = journal_directory(|name| variable(name).map(|(_, value)| value.into()));
    let s3 = build_s3_client(url, env)?.with_bucket_name(bucket).build().map_err(settings)?;
    let objects: Arc<dyn ObjectStore> = if prefix.is_root() {
        Arc::new(s3.clone())
    } else {
        Arc::new(PrefixStore::new(s3.clone(), prefix.clone()))
    };
    let bucket = Some(S3Bucket { s3, prefix });
    Ok(StoreBackend {
        url: url.to_owned(),
        objects,
        local: None,
        bucket,
        gateway: None,
        journal_dir: journals,
        recent_files: Mutex::default(),
    })
}

/// Configures the S3 client from the `AWS_*` variables. Fails when they contain no credentials.
fn build_s3_client(
    url: &str,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<AmazonS3Builder, OpenError> {
    bounded_http::install_crypto_provider();
    let mut builder = AmazonS3Builder::new();
    let mut has_credentials = false;
    let mut allow_http = false;
    for (name, value) in env.into_iter().filter(|(name, value)| {
        // `object_store` also reads names without prefix (TOKEN, REGION, …), but those variables
        // are not meant for it.
        name.starts_with("AWS_") && !value.is_empty()
    }) {
        use AmazonS3ConfigKey as Key;
        let Ok(key) = name.to_ascii_lowercase().parse::<Key>() else { continue };
        has_credentials |= matches!(
            key,
            Key::AccessKeyId
                | Key::WebIdentityTokenFile
                | Key::ContainerCredentialsRelativeUri
                | Key::ContainerCredentialsFullUri
                | Key::MetadataEndpoint
                | Key::SkipSignature
        );
        allow_http |=
            matches!(key, Key::Endpoint | Key::S3Endpoint) && value.starts_with("http://");
        builder = builder.with_config(key, value);
    }
    if !has_credentials {
        // Without credentials, `object_store` would query 169.254.169.254 and wait for minutes.
        return Err(OpenError::Credentials { url: url.to_owned() });
    }
    let client = ClientOptions::new()
        .with_timeout(REQUEST_TIMEOUT)
        .with_connect_timeout(CONNECT_TIMEOUT)
        .with_allow_http(allow_http);
    Ok(builder.with_client_options(client).with_retry(retry_config()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[tokio::test]
    async fn a_url_we_cannot_use_is_refused_with_a_remedy() {
        for (url, remedy) in [
            ("gs://bucket", "use file:// or s3://"),
            ("/srv/store", "file:///srv/store"),
            ("store", "file:///absolute/directory"),
            ("file://store", "must be absolute"),
            ("s3://", "s3://bucket/prefix"),
            ("s3://key:secret@bucket/x", "AWS_*"),
            ("s3://bucket/../x", "'..'"),
        ] {
            let error = open_backend(url, env(&[])).await.map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(remedy), "{url}: {error}");
        }
    }

    #[test]
    fn only_aws_variables_are_read_and_credentials_are_required() {
        let only_strangers = env(&[("ACCESS_KEY_ID", "a"), ("TOKEN", "b"), ("REGION", "c")]);
        let refused = build_s3_client("s3://b", only_strangers);
        assert!(matches!(refused, Err(OpenError::Credentials { .. })));
        let ours =
            env(&[("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("TOKEN", "t")]);
        let builder = build_s3_client("s3://b", ours).unwrap();
        assert_eq!(builder.get_config_value(&AmazonS3ConfigKey::Token), None);
        let key = builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId);
        assert_eq!(key.as_deref(), Some("a"));
    }
}
