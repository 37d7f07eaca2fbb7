//! What a process tells Prometheus, and where. Names are node_exporter's where it has them; all
//! are in docs/METRICS.md. Knows nothing of what is measured.

mod endpoint;
mod page;

pub use endpoint::Endpoint;
pub use page::{Labels, Page, Source, count, documented, flag, names, text};
