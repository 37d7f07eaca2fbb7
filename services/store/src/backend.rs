//! Object storage behind a store URL. This module handles the traps of `facts/store.md`: only
//! `AWS_*` is read from the environment, and timeouts and retries fit large files.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use object_store::{
    BackoffConfig, ClientOptions, ObjectStore, ObjectStoreExt, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
    local::LocalFileSystem,
    path::Path,
    prefix::PrefixStore,
};

use crate::{
    error::{OpenError, StorageError},
    gateway_store::{GatewayObjectStore, GatewayStore},
    path::RelativePath,
    store::run_blocking,
    upload::{journal_directory, link_file},
};
use wire::Digest;

/// Limit for a whole request with its body of at most one part: 16 MiB in 300 s is 56 kB/s.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(300);
/// Limit for connecting to a server.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time that a store may be unreachable. A request is signed once and S3 refuses signatures
/// older than 15 minutes, so a longer limit would only end in another error.
const RETRY_TIMEOUT: Duration = Duration::from_secs(600);

/// The storage behind a [`Store`](crate::Store): a directory, an S3 bucket or a gateway. `objects`
/// reaches all three kinds; exactly one of `local`, `bucket` and `gateway` is set and gives access
/// to operations of that kind alone.
pub(crate) struct StoreBackend {
    /// The URL as the user wrote it, without a slash at its end.
    pub(crate) url: String,
    /// The objects, for operations that all kinds of storage support.
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// The directory, for reads that bypass `object_store`'s slow local stream.
    pub(crate) local: Option<LocalFileSystem>,
    /// The bucket, for operations that only S3 supports: signed URLs and resumable uploads.
    pub(crate) bucket: Option<S3Bucket>,
    /// The gateway client, if the store is behind a gateway.
    pub(crate) gateway: Option<GatewayObjectStore>,
    /// The directory of upload journals, which record the uploaded parts.
    pub(crate) journal_dir: Option<PathBuf>,
    /// Keys of large tree files that this process uploaded lately, by digest: the next tree may
    /// contain them unchanged.
    pub(crate) recent_files: Mutex<BTreeMap<Digest, Path>>,
}

/// A bucket, and the prefix of the store in it.
#[derive(Debug)]
pub(crate) struct S3Bucket {
    /// The S3 client of the bucket.
    pub(crate) s3: AmazonS3,
    /// The prefix of all keys of the store.
    prefix: Path,
}

impl S3Bucket {
    /// Returns the key in the bucket, with the prefix.
    pub(crate) fn full_key(&self, key: &Path) -> Path {
        self.prefix.parts().chain(key.parts()).collect()
    }
}

impl StoreBackend {
    /// Returns the URL of an object, for messages.
    pub(crate) fn object_url(&self, key: &Path) -> String {
        format!("{}/{key}", self.url)
    }

    /// Gives an object another name, or its bytes to another: within the store.
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

    /// Converts an error of a request for `key`.
    pub(crate) fn storage_error(&self, key: &Path, source: object_store::Error) -> StorageError {
        StorageError::new(self.object_url(key), source)
    }
}

/// Opens a directory (`file:///…`) or a bucket (`s3://…`).
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

/// Opens the store behind a gateway.
pub(crate) fn open_gateway(door: &GatewayStore) -> Result<StoreBackend, OpenError> {
    let objects = GatewayObjectStore::new(door)?;
    let (url, door) = (door.store_url(), Some(objects.clone()));
    let journals = journal_directory(|name| std::env::var_os(name));
    Ok(StoreBackend {
        url,
        objects: Arc::new(objects),
        local: None,
        bucket: None,
        gateway: door,
        journal_dir: journals,
        recent_files: Mutex::default(),
    })
}

/// Builds the error for a URL that cannot be used.
fn url_error(url: &str, reason: String) -> OpenError {
    OpenError::Url { url: url.to_owned(), reason }
}

/// Opens a directory as a store and creates it if absent.
async fn open_directory(url: &str, dir: &str) -> Result<StoreBackend, OpenError> {
    if !dir.starts_with('/') {
        return Err(url_error(
            url,
            "a directory must be absolute: file:///srv/flotilla".to_owned(),
        ));
    }
    let path = PathBuf::from(dir);
    let failed = |source| OpenError::Directory { path: path.clone(), source };
    tokio::fs::create_dir_all(&path).await.map_err(failed)?;
    let settings = |source| OpenError::Settings { url: url.to_owned(), source: Box::new(source) };
    let local = LocalFileSystem::new_with_prefix(&path).map_err(settings)?.with_fsync(true);
    let objects = Arc::new(local.clone());
    let (local, bucket, door, journals) = (Some(local), None, None, None);
    Ok(StoreBackend {
        url: url.to_owned(),
        objects,
        local,
        bucket,
        gateway: door,
        journal_dir: journals,
        recent_files: Mutex::default(),
    })
}

/// Opens an S3 bucket, with credentials and server address from `AWS_*`.
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

/// Configures the S3 client from the `AWS_*` variables of `env`. Fails when they contain no
/// credentials.
fn build_s3_client(
    url: &str,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<AmazonS3Builder, OpenError> {
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

/// Returns the retry settings for requests to a store, used for S3 and for the gateway.
pub(crate) fn retry_config() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(10),
            base: 2.0,
        },
        max_retries: 200,
        retry_timeout: RETRY_TIMEOUT,
    }
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
