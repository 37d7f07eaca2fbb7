//! What users read, compared with what there is.
