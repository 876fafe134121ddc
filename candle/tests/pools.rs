//! Tests of pools: slots are handed out and taken back, and copies from slot to slot are exact.

mod gpu;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_gated_delta::{LayerShape, Operator, Row, Rows, StateLayout, StatePool};

fn shape(operator: Operator) -> LayerShape {
    LayerShape {
        operator,
        heads: 2,
        value_heads: 2,
        key_dim: 64,
        value_dim: 64,
        taps: 4,
    }
}

#[test]
fn a_slot_is_of_one_sequence_at_a_time() -> Result<()> {
    let device = &Device::Cpu;
    let mut pool = StatePool::new(shape(Operator::Gdn), 1, 2, DType::F32, DType::F32, device)?;
    let (first, second) = (pool.take(), pool.take());
    assert_eq!((first, second, pool.take()), (Some(0), Some(1), None));
    assert_eq!(pool.free_slots(), 0);
    pool.give_back(1)?;
    assert_eq!(pool.take(), Some(1));
    pool.give_back(1)?;
    for wrong in [1, 2] {
        let error = pool.give_back(wrong).expect_err("a slot that nobody has");
        assert!(
            error.to_string().contains(&format!("got {wrong}")),
            "{error}"
        );
    }
    assert!(pool.layer(1).is_err());
    Ok(())
}

#[test]
fn copies_are_bit_for_bit_in_all_layers() -> Result<()> {
    for device in [Some(Device::Cpu), gpu::gpu()?].into_iter().flatten() {
        copies_are_exact(&device)?;
    }
    Ok(())
}

fn copies_are_exact(device: &Device) -> Result<()> {
    let wide = LayerShape {
        key_dim: 96,
        value_dim: 192,
        ..shape(Operator::Gdn)
    };
    for (shape, layout) in [
        (shape(Operator::Gdn), StateLayout::KLast),
        (shape(Operator::Kda), StateLayout::KLast),
        (wide, StateLayout::VLast),
    ] {
        let pool = StatePool::new(shape, 2, 5, DType::BF16, DType::F32, device)?;
        let pool = pool.state_layout(layout)?;
        let mut before = Vec::new();
        for index in 0..2 {
            let layer = pool.layer(index)?;
            // The states are filled in place, since they are never replaced. A NaN is copied as a NaN.
            let states = Tensor::randn(0f32, 1., layer.states.dims(), device)?;
            layer.states.slice_set(&states, 0, 0)?;
            let windows = layer.windows.transpose(1, 2)?;
            let random = Tensor::randn(0f32, 1., windows.dims(), device)?;
            windows.slice_set(&random.to_dtype(DType::BF16)?, 0, 0)?;
            before.push((states, random.to_dtype(DType::BF16)?));
        }
        pool.copy(&[1, 4], &[3, 0])?;
        let slots = Tensor::new(&[4u32, 1, 2, 1, 4], device)?;
        for (index, (states, windows)) in before.into_iter().enumerate() {
            let layer = pool.layer(index)?;
            let bits = |tensor: &Tensor| -> Result<Vec<f32>> {
                Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
            };
            let wanted = bits(&states.index_select(&slots, 0)?)?;
            assert_eq!(bits(&layer.states)?, wanted, "{shape:?}, states");
            let wanted = bits(&windows.index_select(&slots, 0)?)?;
            let got = bits(&layer.windows.transpose(1, 2)?)?;
            assert_eq!(got, wanted, "{shape:?}, windows");
        }
        for (from, to) in [
            (&[1u32, 2][..], &[3u32, 3][..]),
            (&[1, 3], &[3, 0]),
            (&[1], &[]),
        ] {
            assert!(pool.copy(from, to).is_err(), "{from:?} to {to:?}");
        }
        pool.copy(&[], &[])?;
    }
    Ok(())
}

#[test]
fn a_batch_counts_its_tokens() -> Result<()> {
    let row = |tokens, position| Row {
        tokens,
        position,
        ..Row::default()
    };
    let rows = Rows::new(&[row(3, 0), row(70, 64), row(0, 5)], 64, &Device::Cpu)?;
    assert_eq!(rows.total(), 73);
    let keeps = Row {
        checkpoints: vec![1],
        ..row(64, 0)
    };
    for every in [0, 32] {
        assert!(Rows::new(std::slice::from_ref(&keeps), every, &Device::Cpu).is_err());
    }
    Ok(())
}
