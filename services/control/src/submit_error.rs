//! The reasons why a run is not submitted.

use bus::{ExchangeError, PublishError, ReadError};
use spec::{FieldError, SpecError};
use store::{GetError, PutError};
use wire::RunId;

use crate::{
    StoreAccessError,
    base_model::BaseError,
    channels::ChannelError,
    checkpoints::CheckpointError,
    data::{BaseFilesError, DataError},
    spec_files::SpecFileError,
};

/// Largest number of runs with one name.
pub(crate) const NUMBER_MAX: u32 = 1_000_000;

/// The reason why the file or the base that a field names cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlacedError {
    #[error(transparent)]
    File(#[from] SpecFileError),
    #[error(transparent)]
    Data(#[from] Box<DataError>),
    #[error(transparent)]
    Base(#[from] Box<BaseError>),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// The reason why a run was not submitted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("field {field}")]
    File {
        field: String,
        #[source]
        source: SpecFileError,
    },
    #[error("field {field}")]
    Data {
        field: String,
        #[source]
        source: Box<DataError>,
    },
    #[error("field base")]
    Model(#[from] BaseFilesError),
    #[error("field {field}")]
    Checkpoint {
        field: String,
        #[source]
        source: Box<CheckpointError>,
    },
    #[error("field {field}")]
    Base {
        field: String,
        #[source]
        source: Box<BaseError>,
    },
    #[error("field base.channel")]
    Channel(#[source] Box<ChannelError>),
    #[error("read the feedback that the spec names")]
    Feedback(#[from] ExchangeError),
    #[error("stage the model's files")]
    Stage(#[source] std::io::Error),
    #[error("read the base's manifest")]
    Manifest(#[from] GetError),
    #[error("store what the spec names")]
    Store(#[from] PutError),
    #[error(transparent)]
    OpenStore(#[from] StoreAccessError),
    #[error("write the spec to the log")]
    Publish(#[from] PublishError),
    #[error("read the log")]
    Read(#[from] ReadError),
    /// Any of the errors above, with the place of the field.
    #[error("line {line}, column {column}: {field}")]
    Placed {
        line: usize,
        column: usize,
        field: String,
        #[source]
        source: Box<PlacedError>,
    },
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error(
        "wrote {written} of the {of} runs of sweep {sweep}; `flotilla run cancel --sweep {sweep}` ends them"
    )]
    Unfinished {
        sweep: RunId,
        written: usize,
        of: usize,
        #[source]
        source: Box<SubmitError>,
    },
    #[error("another run learns from the feedback on {0}, or has done so; try again later (R105)")]
    Learning(RunId),
    #[error("{name} has been used for {NUMBER_MAX} runs; choose another name (R109)")]
    TooMany { name: String },
}

impl From<ChannelError> for SubmitError {
    fn from(source: ChannelError) -> Self {
        Self::Channel(Box::new(source))
    }
}

impl From<CheckpointError> for SubmitError {
    fn from(source: CheckpointError) -> Self {
        Self::Checkpoint { field: "base.checkpoint".to_owned(), source: Box::new(source) }
    }
}

impl SubmitError {
    pub(crate) fn data_error(field: &str, source: DataError) -> Self {
        Self::Data { field: field.into(), source: Box::new(source) }
    }

    pub(crate) fn base_error(source: BaseError) -> Self {
        Self::Base { field: "base.model".to_owned(), source: Box::new(source) }
    }

    pub(crate) fn adapter_error(source: BaseError) -> Self {
        Self::Base { field: "base.adapter".to_owned(), source: Box::new(source) }
    }

    /// Names another section of the spec than `base` as the place of a base's error.
    pub(crate) fn in_section(self, section: &str) -> Self {
        match self {
            Self::Base { source, .. } => Self::Base { field: format!("{section}.model"), source },
            Self::Checkpoint { source, .. } => {
                Self::Checkpoint { field: format!("{section}.checkpoint"), source }
            }
            other => other,
        }
    }

    /// Adds the place in the spec that names the file or the base at fault.
    pub(crate) fn with_place(self, yaml: &str) -> Self {
        let place = |field: &str| spec::find_place(yaml, field);
        let placed = |(line, column), field: String, source: PlacedError| {
            let source = Box::new(source);
            Self::Placed { line, column, field, source }
        };
        match self {
            Self::Field(error) => Self::Spec(SpecError::from_field(yaml, &error)),
            Self::File { field, source } => match place(&field) {
                Some(place) => placed(place, field, source.into()),
                None => Self::File { field, source },
            },
            Self::Data { field, source } => match place(&field) {
                Some(place) => placed(place, field, source.into()),
                None => Self::Data { field, source },
            },
            Self::Base { field, source } if source.is_caller_fault() => match place(&field) {
                Some(place) => placed(place, field, source.into()),
                None => Self::Base { field, source },
            },
            Self::Checkpoint { field, source } if source.is_caller_fault() => match place(&field) {
                Some(place) => placed(place, field, (*source).into()),
                None => Self::Checkpoint { field, source },
            },
            other => other,
        }
    }

    /// Returns true if the caller's spec or files are at fault, rather than the fleet.
    pub fn is_caller_fault(&self) -> bool {
        match self {
            Self::Base { source, .. } => source.is_caller_fault(),
            Self::Checkpoint { source, .. } => !source.is_transient(),
            Self::Model(BaseFilesError::Get(error)) => !error.is_transient(),
            Self::Model(BaseFilesError::Stage(_)) => false,
            Self::Channel(error) => !error.is_transient(),
            Self::Stage(_)
            | Self::OpenStore(_)
            | Self::Feedback(_)
            | Self::Manifest(_)
            | Self::Store(_)
            | Self::Publish(_)
            | Self::Unfinished { .. }
            | Self::Learning(_)
            | Self::Read(_) => false,
            _ => true,
        }
    }
}
