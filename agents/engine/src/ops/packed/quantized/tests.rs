use super::super::kernel::TileSums;
use super::super::{
    Bf16Rows, MatmulKernel, PackedMatrix, PackedProjection, ProjectionInputs, ProjectionWeight,
    project_packed,
};
use super::*;
use crate::random::RandomStream;

/// Rows of activations, columns, inner: less than a tile, whole tiles, more than one of everything.
const SHAPES: [(usize, usize, usize); 6] =
    [(1, 16, 64), (1, 20, 40), (5, 33, 100), (17, 64, 128), (33, 260, 130), (70, 300, 1201)];

fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut random = RandomStream::new(seed);
    (0..count).map(|_| random.next_normal() as f32).collect()
}

fn project(x: &[f32], weight: &QuantizedMatrix, bias: Option<&[f32]>) -> Vec<f32> {
    let (columns, width) = weight.shape();
    let kernel = MatmulKernel::fastest();
    let mut out = vec![f32::NAN; x.len() / width * columns];
    let x = ProjectionInputs::for_quantized_weights(kernel, x, width);
    let terms = vec![(&x, ProjectionWeight::Quantized(weight))];
    project_packed(vec![PackedProjection { out: &mut out, terms, bias }]);
    out
}

/// Computes with the values that the blocks represent, in f64.
fn naive(x: &[f32], weight: &QuantizedMatrix) -> Vec<f64> {
    let (columns, width) = weight.shape();
    let rounded = x.chunks_exact(width).map(|x| {
        let blocks = x.chunks(BLOCK_VALUES).flat_map(|x| {
            let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let quantized = |x: &f32| (x * (127.0 / largest)).round_ties_even() * (largest / 127.0);
            x.iter().map(quantized).map(f64::from).collect::<Vec<_>>()
        });
        blocks.collect::<Vec<_>>()
    });
    let rows: Vec<Vec<f32>> = (0..columns)
        .map(|column| {
            let mut row = vec![0f32; width];
            weight.copy_column(column, &mut row).unwrap();
            row
        })
        .collect();
    let dot = |x: &[f64], w: &[f32]| x.iter().zip(w).map(|(x, w)| x * f64::from(*w)).sum();
    rounded.flat_map(|x| rows.iter().map(|w| dot(&x, w)).collect::<Vec<f64>>()).collect()
}

#[test]
fn products_are_those_of_the_quantised_values() {
    for (rows, columns, inner) in SHAPES {
        let weight = QuantizedMatrix::quantize(&values(columns * inner, 2), inner).unwrap();
        let (x, bias) = (values(rows * inner, 1), values(columns, 3));
        let out = project(&x, &weight, Some(&bias));
        for (at, (ours, exact)) in out.iter().zip(naive(&x, &weight)).enumerate() {
            let off = f64::from(*ours) - exact - f64::from(bias[at % columns]);
            assert!(off.abs() < 1e-3, "{rows} {columns} {inner}: element {at} is off by {off}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_is_beside_it_and_on_any_processor() {
    let (columns, inner) = (100, 200);
    let weight = QuantizedMatrix::quantize(&values(columns * inner, 2), inner).unwrap();
    let x = values(40 * inner, 1);
    let all = project(&x, &weight, None);
    for (row, x) in x.chunks_exact(inner).enumerate() {
        assert_eq!(project(x, &weight, None), all[row * columns..][..columns]);
    }
    let part = weight.slice_columns(&(32..80)).unwrap();
    let expected = all.chunks_exact(columns).flat_map(|row| row[32..80].to_vec());
    assert_eq!(project(&x, &part, None), expected.collect::<Vec<_>>());
    let rows = QuantizedRows::quantize(&x, inner);
    for group in (0..6).step_by(2) {
        let steps = 0..weight.step_count();
        let tiles = |group| weight.group_tiles(group, &steps);
        let (first, second) = (tiles(group), Some(tiles(group + 1)));
        let right = RightTiles { first, second, next: [&[]; 2] };
        let mut blocks = [[[TileSums::ZERO; 2]; 2]; 2];
        add_quantized_product(&mut blocks[0], rows.rows_from(3, 0), right);
        portable::add_product(&mut blocks[1], rows.rows_from(3, 0), right);
        let [ours, portable] = blocks.map(|block| block.map(|tiles| tiles.map(|sums| sums.0)));
        assert_eq!(ours, portable);
    }
}

#[test]
fn values_of_a_quantised_file_keep_their_blocks() {
    let weight = QuantizedMatrix::quantize(&values(20 * 70, 2), 70).unwrap();
    let represented = |weight: &QuantizedMatrix| {
        let mut all = vec![0f32; 20 * 70];
        for (column, row) in all.chunks_exact_mut(70).enumerate() {
            weight.copy_column(column, row).unwrap();
        }
        all
    };
    let first = represented(&weight);
    let again = QuantizedMatrix::quantize(&first, 70).unwrap();
    assert_eq!(represented(&again), first);
    assert!(weight.copy_column(20, &mut [0.0; 70]).is_none());
}

#[test]
fn terms_in_bf16_are_added_and_numbers_that_are_not_finite_stay_so() {
    let (columns, inner) = (40, 64);
    let weight = QuantizedMatrix::quantize(&values(columns * inner, 2), inner).unwrap();
    let (x, low) = (values(inner, 1), [1.0f32, -2.0]);
    let b: Vec<bf16> = (0..2 * columns).map(|at| bf16::from_f32((at % 7) as f32)).collect();
    let kernel = MatmulKernel::fastest();
    let b_rows = Bf16Rows::new(&b, 2);
    let packed = PackedMatrix::pack_all(kernel, &[b_rows], |_| ()).unwrap();
    let mut out = vec![0f32; columns];
    let inputs = [
        ProjectionInputs::for_quantized_weights(kernel, &x, inner),
        ProjectionInputs::for_packed_weights(kernel, &low, 2),
    ];
    let weights = [ProjectionWeight::Quantized(&weight), ProjectionWeight::Packed(&packed[0])];
    let terms = inputs.iter().zip(weights).collect();
    project_packed(vec![PackedProjection { out: &mut out, terms, bias: None }]);
    for (column, (both, alone)) in out.iter().zip(project(&x, &weight, None)).enumerate() {
        let more =
            b_rows.row_values(column)[0].to_f32() - 2.0 * b_rows.row_values(column)[1].to_f32();
        assert!((both - alone - more).abs() < 1e-4, "{both} {alone} {more}");
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = x.clone();
        x[3] = bad;
        assert!(project(&x, &weight, None).iter().all(|sum| !sum.is_finite()));
    }
    assert!(project(&[0.0; 64], &weight, None).iter().all(|sum| *sum == 0.0));
}
