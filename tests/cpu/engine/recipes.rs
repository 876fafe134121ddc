//! Launches from recipes, without the library's launcher.

use std::ffi::{CString, c_void};
use std::ptr;

use gated_delta::driver::{Context, Module, RawFunction};
use gated_delta::raw::Recipe;
use gated_delta::{Activation, DType, Entry, Error, StateLayout, StreamRef, Work};
use gated_delta_harness::arguments::Operator;
use gated_delta_kernels::machine;
use gated_delta_test_support::backend::{Backend, cuda, simulator};
use gated_delta_test_support::compare::check;
use gated_delta_test_support::for_all;
use gated_delta_test_support::problem::Sizes;
use gated_delta_test_support::spec::{ConvChoice, Family, NormChoice, Spec};
use gated_delta_test_support::strategy::specs;

use crate::engine::families;

#[test]
fn a_recipe_is_what_a_launch_is_made_of() {
    for family in Family::all() {
        for_all("recipes", 8, specs(family, 16), |spec| {
            let case = spec.case();
            case.nowhere(|work| check_recipe(work, case.batch()));
        });
    }
}

fn check_recipe(work: &dyn Work, batch: usize) {
    let recipe = work.recipe().unwrap();
    let (kernel, shape, parameter) = (recipe.kernel, recipe.shape, recipe.parameter());
    assert_eq!(kernel.entry(), work.selected().unwrap());
    assert_eq!(kernel.symbol(), kernel.entry().name());
    // The parameter block of a layer is the whole struct, that of other entries its first part.
    let params = work.params();
    let params = bytemuck::bytes_of(&params);
    assert_eq!(parameter, &params[..kernel.entry().parameter_bytes()]);
    assert_eq!(shape.grid[2] as usize, batch);
    let entry = kernel.entry();
    let most = entry.block_of(entry.max_heads());
    assert!(shape.block <= most);
    let text = kernel.ptx().unwrap();
    assert!(!text.contains("GD_"), "a constant without a value");
    for expected in [
        format!(".visible .entry {}(", kernel.symbol()),
        format!(
            ".param .align 8 .b8 {}_param_0[{}]",
            kernel.symbol(),
            parameter.len()
        ),
        format!(".maxntid {most}, 1, 1"),
    ] {
        assert!(text.contains(&expected), "{expected} is not in the PTX");
    }
}

/// A kernel is a cache key: it changes with everything that is compiled in, and not with B and addresses.
#[test]
fn a_kernel_is_the_key_of_what_is_compiled() {
    let family = Family::decode(StateLayout::KLast, DType::F32, 64);
    let kernel = |change: &dyn Fn(&mut Spec)| {
        let mut spec = Spec::plain(family);
        change(&mut spec);
        spec.case().nowhere(|work| work.recipe().unwrap().kernel)
    };
    let plain = kernel(&|_| {});
    assert_eq!(plain, kernel(&|spec| spec.batch += 1));
    let others = [
        kernel(&|spec| spec.heads += 1),
        kernel(&|spec| spec.ratio += 1),
        kernel(&|spec| spec.options.qk_l2norm = !spec.options.qk_l2norm),
        kernel(&|spec| spec.options.scale = Some(0.25)),
        kernel(&|spec| spec.options.null_slot = Some(0)),
    ];
    for (i, other) in others.iter().enumerate() {
        assert_ne!(plain, *other, "change {i}");
        assert_ne!(plain.ptx().unwrap(), other.ptx().unwrap(), "change {i}");
    }
}

#[test]
fn tensors_in_host_memory_have_no_recipe() {
    for family in families() {
        let case = Spec::plain(family).case();
        let (error, _) = simulator()
            .with(&case, |_, _, args| args.work()?.recipe())
            .unwrap();
        assert!(
            matches!(
                error,
                Err(Error::Memory {
                    wanted: "device",
                    ..
                })
            ),
            "{error:?}"
        );
    }
}

#[test]
fn every_entry_has_a_template() {
    for &entry in Entry::ALL {
        let text = gated_delta::raw::template(entry).unwrap();
        assert!(text.contains(&format!(".entry {}(", entry.name())));
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let constants: Vec<&str> = words.filter(|word| word.starts_with("GD_")).collect();
        // This entry makes up its factors and has no constants.
        let none = entry == Entry::warpgroup_contract;
        assert_eq!(constants.is_empty(), none, "{}", entry.name());
        for constant in constants {
            // The other symbols are constants of the machine.
            let is_word = machine::word(constant, machine::HOPPER).is_some();
            assert!(
                is_word || entry.symbols().contains(&constant),
                "{}: {constant}",
                entry.name()
            );
        }
    }
}

#[test]
fn a_layer_is_compiled_for_its_convolution_and_norm() {
    let family = Family::layer(Operator::Gdn, StateLayout::KLast, DType::F32, 64);
    let kernel = |change: &dyn Fn(&mut Spec)| {
        let mut spec = Spec::plain(family);
        change(&mut spec);
        spec.case().nowhere(|work| work.recipe().unwrap().kernel)
    };
    let conv = |change: fn(&mut ConvChoice)| kernel(&|spec| spec.conv.iter_mut().for_each(change));
    let norm = |change: fn(&mut NormChoice)| kernel(&|spec| spec.norm.iter_mut().for_each(change));
    let mut all = vec![
        kernel(&|_| {}),
        kernel(&|spec| spec.conv = None),
        kernel(&|spec| spec.norm = None),
        kernel(&|spec| spec.fresh = true),
        kernel(&|spec| spec.form.token_major = true),
        kernel(&|spec| spec.form.norm[1] = DType::F16),
        conv(|conv| conv.taps = 3),
        conv(|conv| conv.bias = true),
        conv(|conv| conv.activation = Activation::None),
        norm(|norm| norm.eps = 1e-5),
        norm(|norm| norm.activation = Activation::Sigmoid),
    ];
    assert_eq!(all[0], kernel(&|spec| spec.batch += 1));
    let mut texts: Vec<String> = all.iter().map(|kernel| kernel.ptx().unwrap()).collect();
    let count = all.len();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), count, "two share their code");
    while let Some(one) = all.pop() {
        assert!(!all.contains(&one), "two share their key: {one:?}");
    }
}

/// A launch from a recipe leaves the same bytes as a launch by the library.
#[test]
fn a_launch_by_recipe_is_a_launch() {
    let Some(backend @ Backend::Cuda(..)) = cuda() else {
        return;
    };
    for family in families() {
        for_all("recipes_on_the_gpu", 12, specs(family, 16), |spec| {
            let case = spec.case();
            let (_, after) = backend
                .with(&case, |library, stream, args| {
                    let context = library.context().unwrap();
                    let recipe = args.work().unwrap().recipe().unwrap();
                    let name = CString::new(recipe.kernel.symbol()).unwrap();
                    let text = CString::new(recipe.kernel.ptx().unwrap()).unwrap();
                    let module = Module::load(context, recipe.kernel.symbol(), &text).unwrap();
                    let function = module.function(&name).unwrap();
                    function
                        .set_shared_bytes(recipe.shape.shared_bytes)
                        .unwrap();
                    launch(context, function.raw(), stream, &recipe);
                })
                .unwrap();
            check(&case, &after);
            assert!(
                after == backend.run(&case, None),
                "not what the library does"
            );
        });
    }
}

/// Launches a recipe and waits, so that the module can be unloaded.
fn launch(context: &Context, function: RawFunction, stream: StreamRef<'_>, recipe: &Recipe) {
    let (driver, stream) = (context.driver(), stream.raw());
    let mut parameters = [recipe.parameter().as_ptr().cast_mut().cast::<c_void>()];
    let [x, y, z] = recipe.shape.grid;
    let _current = context.enter().unwrap();
    // SAFETY: the tensors of the recipe are alive, no other work uses them, and the context is current.
    unsafe {
        driver
            .launch_kernel(
                function,
                x,
                y,
                z,
                recipe.shape.block,
                1,
                1,
                recipe.shape.shared_bytes,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
            .unwrap();
        driver.stream_synchronize(stream).unwrap();
    }
}
