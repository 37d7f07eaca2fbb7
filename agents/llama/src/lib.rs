//! llama.cpp's programs as supervised children: where they are, how they are called, what can be
//! believed of what they print. Synchronous; used inside worker processes.

mod child;
pub mod completion;
mod environment;
mod installation;
mod perplexity;
pub mod scoring;
mod server;
mod shelf;

pub use child::{Child, Heard, Line, Stream};
pub use environment::Environment;
pub use installation::{Installation, InstallationError, Options};
pub use perplexity::{Chunks, Perplexity, PerplexityError, Request, Scored};
pub use server::{Address, Serve, Server, ServerError, ServerSettings};
pub use shelf::{Shelf, ShelfError, Shelved, local_key};
