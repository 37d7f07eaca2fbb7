//! Reads the settings of rotary positions, of which each generation of files has its own.

use serde_json::Value;

use super::details::RopeDetails;
use super::fields::{ConfigFields, MAX_POSITIONS, MAX_WIDTH};
use super::{LongRope, ModelConfigError, RopeScaling};
use crate::Architecture;

/// The value that transformers assumes.
const DEFAULT_THETA: f64 = 10_000.0;
/// The values of Gemma 3's global and local layers.
const GEMMA3_THETAS: (f64, f64) = (1e6, 1e4);
/// The value of Phi-3.
const PHI3_ORIGINAL_POSITIONS: usize = 4096;

/// The rotation of queries and keys.
pub(super) struct RopeSettings {
    pub(super) theta: f64,
    pub(super) scaling: Option<RopeScaling>,
    pub(super) details: RopeDetails,
}

impl<'a> ConfigFields<'a> {
    pub(super) fn read_rope_settings(
        &self,
        architecture: Architecture,
        positions: usize,
    ) -> Result<RopeSettings, ModelConfigError> {
        match architecture {
            Architecture::Gemma3 => self.read_two_ropes(),
            Architecture::Phi3 => self.read_long_rope(positions),
            _ => {
                let (theta, scaling) = self.read_rope()?;
                Ok(RopeSettings { theta, scaling, details: RopeDetails::default() })
            }
        }
    }

    /// Returns the object of the rope's parameters, and its name.
    fn find_rope_object(
        &self,
    ) -> Result<Option<(&'static str, ConfigFields<'a>)>, ModelConfigError> {
        Ok(match self.nested_fields("rope_parameters")? {
            Some(rope) => Some(("rope_parameters", rope)),
            None => self.nested_fields("rope_scaling")?.map(|rope| ("rope_scaling", rope)),
        })
    }

    /// Reads `rope_theta` and the rope scaling, from `rope_parameters` or `rope_scaling`.
    fn read_rope(&self) -> Result<(f64, Option<RopeScaling>), ModelConfigError> {
        let theta = self.read_number_or("rope_theta", DEFAULT_THETA)?;
        let Some((field, rope)) = self.find_rope_object()? else { return Ok((theta, None)) };
        let theta = rope.read_number_or("rope_theta", theta)?;
        for fields in [self, &rope] {
            if let Some(share) = fields.get("partial_rotary_factor").filter(|one| **one != 1.0) {
                return Err(self.unsupported_error("partial_rotary_factor", share, "1"));
            }
        }
        let Some(kind) = rope.get("rope_type").or_else(|| rope.get("type")) else {
            // Parameters for each kind of layer are nested one level deeper.
            return match rope.map.values().find(|value| value.is_object()) {
                Some(deeper) => {
                    Err(self.unsupported_error(field, deeper, "one rope for all layers"))
                }
                None => Ok((theta, None)),
            };
        };
        match kind.as_str() {
            Some("default") => Ok((theta, None)),
            Some("llama3") => Ok((theta, Some(rope.read_rope_scaling()?))),
            _ => Err(self.unsupported_error(field, kind, "default, llama3")),
        }
    }

    /// Reads the ropes of global and local layers. The positions of global layers may be divided by
    /// a factor.
    fn read_two_ropes(&self) -> Result<RopeSettings, ModelConfigError> {
        let (global, local) = GEMMA3_THETAS;
        let mut theta = self.read_number_or("rope_theta", global)?;
        let mut local_theta = self.read_number_or("rope_local_base_freq", local)?;
        let mut linear_factor = None;
        if let Some((field, rope)) = self.find_rope_object()? {
            let full = rope.nested_fields("full_attention")?.unwrap_or(rope);
            theta = full.read_number_or("rope_theta", theta)?;
            if let Some(sliding) = rope.nested_fields("sliding_attention")? {
                local_theta = sliding.read_number_or("rope_theta", local_theta)?;
                let kind = sliding.get("rope_type").filter(|kind| **kind != "default");
                if let Some(kind) = kind {
                    return Err(self.unsupported_error(field, kind, "default for local layers"));
                }
            }
            let kind = full.get("rope_type").or_else(|| full.get("type"));
            match kind.map(Value::as_str) {
                None | Some(Some("default")) => {}
                Some(Some("linear")) => linear_factor = Some(full.read_number("factor")?),
                Some(_) => {
                    let found = kind.unwrap_or(&Value::Null);
                    return Err(self.unsupported_error(field, found, "default, linear"));
                }
            }
        }
        let details =
            RopeDetails { local_theta: Some(local_theta), linear_factor, ..RopeDetails::default() };
        Ok(RopeSettings { theta, scaling: None, details })
    }

    /// Reads Phi's rope: a part of each head is rotated, and models of long texts have divisors of
    /// the frequencies.
    fn read_long_rope(&self, positions: usize) -> Result<RopeSettings, ModelConfigError> {
        let found = self.find_rope_object()?;
        let own = |field: &'static str| match found {
            Some((_, rope)) if rope.get(field).is_some() => rope,
            _ => *self,
        };
        let theta = own("rope_theta").read_number_or("rope_theta", DEFAULT_THETA)?;
        let share = own("partial_rotary_factor").read_number_or("partial_rotary_factor", 1.0)?;
        if share > 1.0 {
            let found = share.to_string();
            return Err(self.invalid_error("partial_rotary_factor", found, "at most 1"));
        }
        let original = own("original_max_position_embeddings").read_size_or(
            "original_max_position_embeddings",
            PHI3_ORIGINAL_POSITIONS,
            MAX_POSITIONS,
        )?;
        let mut long_rope = LongRope {
            rotated_share: share,
            original_max_positions: original,
            long_factors: Vec::new(),
            short_factors: Vec::new(),
            attention_factor: 1.0,
        };
        let kind = |rope: ConfigFields<'a>| rope.get("rope_type").or_else(|| rope.get("type"));
        if let Some((field, rope)) = found
            && let Some(kind) = kind(rope).filter(|kind| **kind != "default")
        {
            if !matches!(kind.as_str(), Some("longrope" | "su")) {
                return Err(self.unsupported_error(field, kind, "default, longrope"));
            }
            long_rope.long_factors = rope.read_factors("long_factor")?;
            long_rope.short_factors = rope.read_factors("short_factor")?;
            let scale = positions as f64 / original as f64;
            let usual =
                if scale > 1.0 { (1.0 + scale.ln() / (original as f64).ln()).sqrt() } else { 1.0 };
            long_rope.attention_factor = usual;
            if let Some(other) = rope.get("attention_factor").filter(|one| **one != usual) {
                return Err(self.unsupported_error("attention_factor", other, "none"));
            }
        }
        let details = RopeDetails { long_rope: Some(long_rope), ..RopeDetails::default() };
        Ok(RopeSettings { theta, scaling: None, details })
    }

    /// Reads a list of positive numbers.
    fn read_factors(&self, field: &'static str) -> Result<Vec<f32>, ModelConfigError> {
        let value = self.require_field(field)?;
        let items = value.as_array().filter(|items| items.len() <= MAX_WIDTH);
        let number = |item: &Value| item.as_f64().filter(|one| one.is_finite() && *one > 0.0);
        let read = |items: &Vec<Value>| {
            items.iter().map(|item| number(item).map(|one| one as f32)).collect::<Option<Vec<_>>>()
        };
        items.and_then(read).ok_or_else(|| {
            let found = value.to_string().chars().take(80).collect();
            self.invalid_error(field, found, "a list of positive numbers")
        })
    }
}
