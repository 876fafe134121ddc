use super::*;

#[test]
fn packed_slices_are_views() {
    let (heads, k) = (2, 4);
    let packed = vec![half::bf16::ZERO; 3 * 2 * heads * k];
    let packed = Tensor::from_slice(&packed, &[3, 2 * heads * k]).unwrap();
    let key = packed
        .narrow(1, heads * k, heads * k)
        .unwrap()
        .split(1, k)
        .unwrap();
    assert_eq!(key.address(), packed.address() + 16);
    assert_eq!(
        (&key.dims()[..], &key.strides()[..]),
        (&[3, 2, 4][..], &[16, 4, 1][..])
    );
    assert!(packed.is_contiguous() && !key.is_contiguous());
    assert_eq!(key.alignment(), 8);
}

#[test]
fn a_view_past_its_storage_is_refused() {
    let storage = [0f32; 8];
    let view = Tensor::from_slice(&storage, &[2, 3]).unwrap();
    assert!(view.with_strides(&[5, 1]).is_ok());
    let message = view.with_strides(&[6, 1]).unwrap_err().to_string();
    assert_eq!(
        message,
        "elements of a view: wanted at most the 8 of its storage, got dims [2, 3] at strides [6, 1]"
    );
    assert!(view.with_strides(&[usize::MAX, 1]).is_err());
    assert!(Tensor::from_slice(&storage, &[9]).is_err());
    assert!(Tensor::from_slice(&storage, &[usize::MAX, 2]).is_err());
    assert!(Tensor::from_slice(&storage, &[1; 6]).is_err());
    let tail = view.narrow(0, 1, 1).unwrap();
    assert!(tail.with_strides(&[3, 2]).is_ok() && tail.with_strides(&[3, 3]).is_err());
    assert!(view.narrow(0, 1, 2).is_err() && view.narrow(2, 0, 1).is_err());
    assert!(view.narrow(1, usize::MAX, 2).is_err() && view.split(1, 2).is_err());
}

#[test]
fn alignment_ignores_dims_of_one() {
    // SAFETY: the view is never read.
    let view = unsafe { Tensor::from_raw(0x1010, DType::Bf16, &[1, 4, 64]) }.unwrap();
    assert_eq!(view.with_strides(&[3, 64, 1]).unwrap().alignment(), 16);
    assert_eq!(view.with_strides(&[3, 66, 1]).unwrap().alignment(), 4);
    assert_eq!(view.narrow(2, 1, 8).unwrap().alignment(), 2);
}

#[test]
fn only_a_mutable_borrow_is_writable() {
    let mut storage = [0u32; 2];
    assert!(!Tensor::from_slice(&storage, &[2]).unwrap().is_writable());
    assert!(
        Tensor::from_slice_mut(&mut storage, &[2])
            .unwrap()
            .is_writable()
    );
}
