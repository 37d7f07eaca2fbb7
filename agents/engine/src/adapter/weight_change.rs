//! The change of an adapter's weights in few bytes, for slow links: the largest values of each
//! tensor, with 2 bits each (after SparseLoCo, arXiv:2508.15706). What is left out is added to the
//! next change (error feedback, arXiv:1901.09847).
//!
//! A change is a safetensors file. In it the values of all tensors, sorted by name, follow each
//! other:
//! - `gaps` (u8), absent if all values are kept: for each kept value, the number of values since the
//!   one before, as a sum of bytes of which only the last is below 255,
//! - `codes` (u8): 2 bits a kept value, from the lowest: the sign, and which of two magnitudes,
//! - `magnitudes` (f32): two of each tensor.

use super::AdapterError;
use super::named_tensors::{NamedTensors, read_like, values, write_directory};
use crate::tensor_file::{self, TensorFileError};
use candle_core::{Device, Tensor};
use formats::peft::TENSOR_FILE;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The file with the change, in its directory.
pub(super) const CHANGE_FILE: &str = "change.safetensors";

/// The file with the values that were left out, in the directory of a slice's state.
const LEFT_OUT_FILE: &str = "left-out.safetensors";

/// Bytes of a change that do not depend on the number of values.
const HEADER_BYTES_MAX: usize = 4096;

/// A trained adapter whose change is to be written.
#[derive(Debug, Clone)]
pub struct WeightChange {
    /// The adapter from which the other was trained.
    pub start: PathBuf,
    pub trained: PathBuf,
    /// The directory with the values that the change before left out; `None` for none.
    pub left_out: Option<PathBuf>,
    /// The share of values that are kept, above 0 and at most 1.
    pub keep: f64,
}

/// The largest values of a tensor.
#[derive(Debug, Clone, PartialEq, Default)]
struct KeptValues {
    /// Ascending.
    indices: Vec<usize>,
    /// Bit 0 is the sign, bit 1 the larger magnitude.
    codes: Vec<u8>,
    magnitudes: [f32; 2],
}

impl WeightChange {
    /// Writes the change into a directory, and the values that it leaves out into another.
    ///
    /// # Errors
    /// When a file cannot be read or written, or the adapters have other tensors.
    pub fn write_change(&self, to: &Path, left_out: &Path) -> Result<(), AdapterError> {
        let start = tensor_file::read_all(&self.start.join(TENSOR_FILE))?;
        let trained = read_like(&self.trained.join(TENSOR_FILE), &start)?;
        let before = self.left_out.as_ref().map(|dir| dir.join(LEFT_OUT_FILE));
        let before = before.filter(|path| path.exists());
        let before = before.map(|path| read_like(&path, &start)).transpose()?;
        let keep = |(name, from): (&String, &Tensor)| {
            let mut change = values(&trained[name])?;
            change.iter_mut().zip(values(from)?).for_each(|(value, start)| *value -= start);
            if let Some(before) = &before {
                change.iter_mut().zip(values(&before[name])?).for_each(|(it, more)| *it += more);
            }
            let kept = KeptValues::choose_largest(&change, self.keep);
            for (index, value) in kept.iter_values() {
                change[index] -= value;
            }
            let rest = Tensor::from_vec(change, from.shape(), &Device::Cpu)?;
            Ok::<_, candle_core::Error>((name.clone(), (kept, from.elem_count(), rest)))
        };
        let kept = start.par_iter().map(keep).collect::<candle_core::Result<BTreeMap<_, _>>>()?;
        let (mut rest, mut all) = (NamedTensors::new(), Vec::new());
        for (name, (kept, count, left)) in kept {
            rest.insert(name, left);
            all.push((kept, count));
        }
        write_kept(&to.join(CHANGE_FILE), &all)?;
        write_directory(left_out, LEFT_OUT_FILE, rest)
    }
}

impl KeptValues {
    /// Keeps the share of values that are farthest from 0, and none that is 0 unless all are kept.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
    fn choose_largest(change: &[f32], keep: f64) -> Self {
        let mut indices: Vec<usize> = (0..change.len()).collect();
        let most = ((change.len() as f64 * keep).ceil() as usize).clamp(1, change.len().max(1));
        if most < change.len() {
            let by_size =
                |a: &usize, b: &usize| change[*b].abs().total_cmp(&change[*a].abs()).then(a.cmp(b));
            indices.select_nth_unstable_by(most, by_size);
            indices.truncate(most);
            indices.sort_unstable();
        }
        if keep < 1.0 {
            indices.retain(|index| change[*index] != 0.0);
        }
        let sizes = || indices.iter().map(|index| f64::from(change[*index].abs()));
        let mean = sizes().sum::<f64>() / indices.len().max(1) as f64;
        let mean_of = |is_large: bool| {
            let some = || sizes().filter(|size| (*size > mean) == is_large);
            (some().sum::<f64>() / some().count().max(1) as f64) as f32
        };
        let code = |index: &usize| {
            let value = change[*index];
            u8::from(value < 0.0) | u8::from(f64::from(value.abs()) > mean) << 1
        };
        let codes = indices.iter().map(code).collect();
        let magnitudes = [mean_of(false), mean_of(true)];
        Self { indices, codes, magnitudes }
    }

    /// Returns the kept values with their indices.
    fn iter_values(&self) -> impl Iterator<Item = (usize, f32)> {
        self.indices.iter().zip(&self.codes).map(|(index, code)| {
            let magnitude = self.magnitudes[usize::from(code >> 1 & 1)];
            (*index, if code & 1 == 1 { -magnitude } else { magnitude })
        })
    }
}

/// Checks that the values that a change left out can be read from its directory, and belong to the
/// weights in `adapter`.
///
/// # Errors
/// When a file is missing or damaged, has other tensors, or values that are not finite.
pub fn check_left_out(left_out: &Path, adapter: &Path) -> Result<(), AdapterError> {
    let path = left_out.join(LEFT_OUT_FILE);
    let adapter = tensor_file::read_all(&adapter.join(TENSOR_FILE))?;
    for tensor in read_like(&path, &adapter)?.values() {
        if !values(tensor)?.iter().all(|value| value.is_finite()) {
            return Err(AdapterError::Change { path });
        }
    }
    Ok(())
}

/// Writes the kept values of all tensors, each with its number of values.
fn write_kept(path: &Path, tensors: &[(KeptValues, usize)]) -> Result<(), AdapterError> {
    let (mut gaps, mut codes, mut magnitudes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut next, mut offset) = (0, 0);
    for (kept, count) in tensors {
        for index in &kept.indices {
            let mut gap = offset + index - next;
            while gap >= 255 {
                gaps.push(255);
                gap -= 255;
            }
            gaps.push(gap as u8);
            next = offset + index + 1;
        }
        codes.extend(&kept.codes);
        magnitudes.extend(kept.magnitudes.iter().flat_map(|value| value.to_le_bytes()));
        offset += count;
    }
    let is_whole = codes.len() == offset;
    let pack = |four: &[u8]| {
        four.iter().enumerate().fold(0, |byte, (place, code)| byte | code << (2 * place))
    };
    let codes: Vec<u8> = codes.chunks(4).map(pack).collect();
    let mut arrays = vec![("codes", Dtype::U8, codes), ("magnitudes", Dtype::F32, magnitudes)];
    if !is_whole {
        arrays.push(("gaps", Dtype::U8, gaps));
    }
    write_arrays(path, &arrays)
}

/// Reads the kept values of tensors with these numbers of values. `None` if they do not fit.
fn read_kept(file: &SafeTensors<'_>, counts: &[usize]) -> Option<Vec<KeptValues>> {
    let array = |name: &str| file.tensor(name).ok();
    let total: usize = counts.iter().sum();
    let indices: Vec<usize> = match array("gaps") {
        None => (0..total).collect(),
        Some(gaps) => read_gaps(gaps.data(), total)?,
    };
    let (codes, magnitudes) = (array("codes")?, array("magnitudes")?);
    let magnitudes: Vec<f32> =
        magnitudes.data().as_chunks::<4>().0.iter().map(|it| f32::from_le_bytes(*it)).collect();
    let fits = codes.data().len() == indices.len().div_ceil(4)
        && magnitudes.len() == 2 * counts.len()
        && magnitudes.iter().all(|value| value.is_finite());
    if !fits {
        return None;
    }
    let (mut place, mut offset) = (0, 0);
    let tensor = |(count, pair): (&usize, &[f32; 2])| {
        let mut kept = KeptValues { magnitudes: *pair, ..KeptValues::default() };
        while let Some(index) = indices.get(place).filter(|index| **index < offset + count) {
            kept.indices.push(index - offset);
            kept.codes.push(codes.data()[place / 4] >> (2 * (place % 4)) & 3);
            place += 1;
        }
        offset += count;
        kept
    };
    Some(counts.iter().zip(magnitudes.as_chunks::<2>().0).map(tensor).collect())
}

/// Returns the places of kept values. `None` if one is not below `total`.
fn read_gaps(gaps: &[u8], total: usize) -> Option<Vec<usize>> {
    let (mut indices, mut next) = (Vec::new(), 0usize);
    for gap in gaps {
        next += usize::from(*gap);
        if next > total {
            return None;
        }
        if *gap < 255 {
            indices.push(next);
            next += 1;
        }
    }
    indices.last().is_none_or(|last| *last < total).then_some(indices)
}

/// Returns the adapter that has changed so from the start.
pub(super) fn read_changed(
    path: &Path,
    start: &NamedTensors,
) -> Result<NamedTensors, AdapterError> {
    let failed = |source| AdapterError::File { path: path.into(), source };
    let values_in: usize = start.values().map(Tensor::elem_count).sum();
    let most = 2 * values_in + 8 * start.len() + HEADER_BYTES_MAX;
    if std::fs::metadata(path).map_err(failed)?.len() > most as u64 {
        return Err(AdapterError::Change { path: path.into() });
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    let damaged = |source| TensorFileError::Format { path: path.into(), source };
    let file = SafeTensors::deserialize(&bytes).map_err(damaged)?;
    let counts: Vec<usize> = start.values().map(Tensor::elem_count).collect();
    let kept = read_kept(&file, &counts);
    let kept = kept.ok_or_else(|| AdapterError::Change { path: path.into() })?;
    let change = |((name, from), kept): ((&String, &Tensor), &KeptValues)| {
        let mut changed = values(from)?;
        for (index, value) in kept.iter_values() {
            changed[index] += value;
        }
        let changed = Tensor::from_vec(changed, from.shape(), &Device::Cpu)?;
        Ok::<_, candle_core::Error>((name.clone(), changed))
    };
    Ok(start.iter().zip(&kept).map(change).collect::<candle_core::Result<_>>()?)
}

fn write_arrays(path: &Path, arrays: &[(&str, Dtype, Vec<u8>)]) -> Result<(), AdapterError> {
    let failed = |source| AdapterError::File { path: path.into(), source };
    std::fs::create_dir_all(path.parent().unwrap_or(path)).map_err(failed)?;
    let format = |source| TensorFileError::Format { path: path.into(), source };
    let views = arrays.iter().map(|(name, dtype, data)| {
        let size = if *dtype == Dtype::F32 { 4 } else { 1 };
        let view = TensorView::new(*dtype, vec![data.len() / size], data);
        Ok((*name, view.map_err(format)?))
    });
    let views = views.collect::<Result<Vec<_>, TensorFileError>>()?;
    Ok(safetensors::serialize_to_file(views, None, path).map_err(format)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::random;
    use formats::peft::CONFIG_FILE;

    const NAME: &str = "model.layers.0.mlp.up_proj.lora_B.weight";

    fn write(dir: &Path, name: &str, tensor: Tensor) -> PathBuf {
        let dir = dir.join(name);
        let still = ("still".to_owned(), random(&[3], 7));
        write_directory(&dir, TENSOR_FILE, [(NAME.to_owned(), tensor), still].into()).unwrap();
        std::fs::write(dir.join(CONFIG_FILE), "{}").unwrap();
        dir
    }

    fn read(change: &Path, start: &Path) -> Vec<f32> {
        let start = tensor_file::read_all(&start.join(TENSOR_FILE)).unwrap();
        let changed = read_changed(&change.join(CHANGE_FILE), &start).unwrap();
        assert_eq!(values(&changed["still"]).unwrap(), values(&start["still"]).unwrap());
        values(&changed[NAME]).unwrap()
    }

    #[test]
    fn what_a_change_leaves_out_follows_in_the_next_ones() {
        let dir = tempfile::tempdir().unwrap();
        let zero = random(&[40, 50], 1).zeros_like().unwrap();
        let (start, trained) = (write(dir.path(), "a", zero), random(&[40, 50], 2));
        let wanted = values(&trained).unwrap();
        let trained = write(dir.path(), "b", trained);
        let mut left_out = None;
        let mut sums = vec![0f32; wanted.len()];
        let mut errors = Vec::new();
        for turn in 1..=40 {
            let change = WeightChange {
                start: start.clone(),
                trained: trained.clone(),
                left_out: left_out.clone(),
                keep: 0.1,
            };
            let to = dir.path().join(format!("change-{turn}"));
            let rest = dir.path().join(format!("rest-{turn}"));
            change.write_change(&to, &rest).unwrap();
            left_out = Some(rest);
            sums.iter_mut().zip(read(&to, &start)).for_each(|(sum, value)| *sum += value);
            let square = |(sum, value): (&f32, &f32)| (sum / turn as f32 - value).powi(2);
            errors.push(sums.iter().zip(&wanted).map(square).sum::<f32>().sqrt());
        }
        let norm = wanted.iter().map(|value| value * value).sum::<f32>().sqrt();
        assert!(errors[0] > 0.7 * norm, "one change has a tenth of the values: {errors:?}");
        assert!(errors[39] < 0.2 * norm, "their mean comes close: {errors:?} of {norm}");
    }

    #[test]
    fn values_that_were_left_out_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let start = write(dir.path(), "a", random(&[4, 5], 1));
        let other = write(dir.path(), "b", random(&[5, 4], 1));
        let rest = dir.path().join("rest");
        let check = |adapter: &Path| check_left_out(&rest, adapter).is_ok();
        assert!(!check(&start), "there are none");
        let write_rest = |tensor: Tensor| {
            let all = [(NAME.to_owned(), tensor), ("still".to_owned(), random(&[3], 2))];
            write_directory(&rest, LEFT_OUT_FILE, all.into()).unwrap();
        };
        write_rest(random(&[4, 5], 2));
        assert_eq!((check(&start), check(&other)), (true, false));
        write_rest(Tensor::from_vec(vec![f32::NAN; 20], (4, 5), &Device::Cpu).unwrap());
        assert!(!check(&start));
        write_rest(random(&[4, 5], 2));
        let path = rest.join(LEFT_OUT_FILE);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 4]).unwrap();
        assert!(!check(&start));
    }

    #[test]
    fn a_change_takes_2_bits_a_value_and_a_byte_for_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let start = write(dir.path(), "a", random(&[300, 1000], 1));
        let trained = write(dir.path(), "b", random(&[300, 1000], 2));
        let bytes = |keep: f64| {
            let change = WeightChange {
                start: start.clone(),
                trained: trained.clone(),
                left_out: None,
                keep,
            };
            let to = dir.path().join(keep.to_string());
            change.write_change(&to, &dir.path().join("rest")).unwrap();
            let read = read(&to, &start);
            let values = |dir: &Path| {
                let all = tensor_file::read_all(&dir.join(TENSOR_FILE)).unwrap();
                values(&all[NAME]).unwrap()
            };
            let moved = values(&start).iter().zip(&read).filter(|(a, b)| a != b).count();
            (std::fs::metadata(to.join(CHANGE_FILE)).unwrap().len(), moved)
        };
        let (sparse, moved) = bytes(0.01);
        assert_eq!(moved, 3000);
        assert!((3750..4500).contains(&sparse), "{sparse}");
        let (dense, moved) = bytes(1.0);
        assert!(moved > 299_000, "{moved}");
        assert!((75_000..75_700).contains(&dense), "{dense}");
    }

    #[test]
    fn a_change_that_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let start: NamedTensors = [(NAME.to_owned(), random(&[4], 1))].into();
        let path = dir.path().join(CHANGE_FILE);
        let change = |gaps: &[u8], codes: &[u8], magnitudes: &[f32]| {
            let floats = magnitudes.iter().flat_map(|value| value.to_le_bytes()).collect();
            let arrays = [
                ("gaps", Dtype::U8, gaps.to_vec()),
                ("codes", Dtype::U8, codes.to_vec()),
                ("magnitudes", Dtype::F32, floats),
            ];
            write_arrays(&path, &arrays).unwrap();
            read_changed(&path, &start)
        };
        let moved = values(&change(&[1, 1], &[0b0110], &[0.5, 2.0]).unwrap()[NAME]).unwrap();
        let from = values(&start[NAME]).unwrap();
        assert_eq!(moved, [from[0], from[1] + 2.0, from[2], from[3] - 0.5]);
        for (gaps, codes, magnitudes) in [
            (&[1, 2][..], &[0][..], &[0.5, 2.0][..]),
            (&[1, 1], &[0, 0], &[0.5, 2.0]),
            (&[1, 1], &[], &[0.5, 2.0]),
            (&[1, 1], &[0], &[0.5]),
            (&[1, 1], &[0], &[0.5, f32::NAN]),
        ] {
            let refused = change(gaps, codes, magnitudes).unwrap_err().to_string();
            assert!(refused.contains("change.safetensors"), "{refused}");
        }
        std::fs::write(&path, "no safetensors").unwrap();
        assert!(read_changed(&path, &start).is_err());
    }
}
