//! Host time of a launch, over a bare launch of the same kernels: `cuLaunchKernel`, or `cuLaunchKernelEx` for a launch with an
//! attribute.

use std::ffi::{CString, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::time::Instant;

use anyhow::{Context as _, Result};
use gated_delta::driver::{
    Context, DeviceMemory, Driver, LaunchAttribute, LaunchConfig, Module, RawFunction, Stream,
    attribute,
};
use gated_delta::raw::LaunchShape;
use gated_delta::step::pending::Rings;
use gated_delta::{
    Convolution, DType, Error, Formulation, Gdn, GdnGates, Inputs, Kda, KdaBeta, KdaDecay,
    KdaGates, Library, Norm, Options, Pending, Previous, States, Stored, StreamRef, Tensor, Work,
};

/// Query/key heads H of Qwen3-Next's layer.
const H: usize = 16;
/// Value heads HV of Qwen3-Next's layer.
const HV: usize = 32;
/// Head dims, K = V.
const DIM: usize = 128;
/// Taps of the convolution, W.
const TAPS: usize = 4;
/// Slots, P.
const SLOTS: usize = 8;
/// Entries of a ring, R: one more than the most pending tokens.
const RING: usize = 9;
/// Rows of the prefill. All but the first have one token.
const ROWS: usize = 4;
/// Tokens of the prefill's first row.
const PROMPT: usize = 1024;

/// A launch whose cost is measured.
pub struct Case {
    /// Name of the case.
    pub name: &'static str,
    /// Arguments of the launch.
    pub work: Box<dyn Work>,
}

/// Places tensors one after the other in memory.
struct Arena {
    next: u64,
}

impl Arena {
    fn tensor(&mut self, dtype: DType, dims: &[usize]) -> Result<Tensor<'static>, Error> {
        const ALIGNMENT: u64 = 256;
        let bytes = dims.iter().product::<usize>() * dtype.size_of();
        let address = self.next;
        self.next = (address + bytes as u64).next_multiple_of(ALIGNMENT);
        // SAFETY: only a launch accesses the memory, and whoever launches a case has memory there (see `cases`).
        unsafe { Tensor::from_raw(address, dtype, dims) }
    }

    fn bf16(&mut self, dims: &[usize]) -> Result<Tensor<'static>, Error> {
        self.tensor(DType::Bf16, dims)
    }

    fn i32(&mut self, dims: &[usize]) -> Result<Tensor<'static>, Error> {
        self.tensor(DType::I32, dims)
    }

    fn f32(&mut self, dims: &[usize]) -> Result<Tensor<'static>, Error> {
        self.tensor(DType::F32, dims)
    }

    fn gates(&mut self, rows: usize, tokens: usize) -> Result<GdnGates<'static>, Error> {
        let dims = [rows, tokens, HV];
        Ok(GdnGates::raw(
            self.bf16(&dims)?,
            self.bf16(&dims)?,
            self.f32(&[HV])?,
            self.f32(&[HV])?,
        ))
    }

    fn states(&mut self, rows: usize) -> Result<States<'static>, Error> {
        let pool = self.bf16(&[SLOTS, HV, DIM, DIM])?;
        Ok(States::update(pool).slots(self.i32(&[rows])?).into())
    }

    fn qkv(&mut self) -> Result<Inputs<'static>, Error> {
        Ok(Inputs::qkv(
            self.bf16(&[1, 1, H, DIM])?,
            self.bf16(&[1, 1, H, DIM])?,
            self.bf16(&[1, 1, HV, DIM])?,
        ))
    }

    fn conv(&mut self, rows: usize, tokens: usize, h: usize) -> Result<Inputs<'static>, Error> {
        let channels = (2 * h + HV) * DIM;
        let x = self.bf16(&[rows, tokens, channels])?;
        let weight = self.bf16(&[channels, TAPS])?;
        let windows = self.bf16(&[SLOTS, channels, TAPS - 1])?;
        Ok(Inputs::conv(Convolution::new(x, h, weight, windows)))
    }

    fn norm(&mut self, rows: usize, tokens: usize) -> Result<Norm<'static>, Error> {
        let z = self.bf16(&[rows, tokens, HV, DIM])?;
        Ok(Norm::new(z, self.bf16(&[DIM])?, 1e-6))
    }

    /// A step of Qwen3-Next's whole layer, with `slots` slots.
    fn layer(&mut self, [rows, tokens]: [usize; 2], slots: usize) -> Result<Gdn<'static>, Error> {
        let step = Gdn::new(
            self.conv(rows, tokens, H)?,
            self.gates(rows, tokens)?,
            self.bf16(&[rows, tokens, HV, DIM])?,
            self.states(slots)?,
        );
        Ok(step.norm(self.norm(rows, tokens)?))
    }

    fn decode(&mut self) -> Result<Gdn<'static>, Error> {
        Ok(Gdn::new(
            self.qkv()?,
            self.gates(1, 1)?,
            self.bf16(&[1, 1, HV, DIM])?,
            self.states(1)?,
        ))
    }

    /// A step of Kimi-Linear's whole layer.
    fn kda_layer(&mut self) -> Result<Kda<'static>, Error> {
        let kind = KdaDecay::LowerBound {
            lower_bound: -5.0,
            a_log: Some(self.f32(&[HV])?),
            dt_bias: Some(self.f32(&[HV, DIM])?),
        };
        let (g, beta) = (self.bf16(&[1, 1, HV, DIM])?, self.bf16(&[1, 1, HV])?);
        let step = Kda::new(
            self.conv(1, 1, HV)?,
            KdaGates::new(g, kind, beta, KdaBeta::Logit),
            self.bf16(&[1, 1, HV, DIM])?,
            self.states(1)?,
        );
        Ok(step.norm(self.norm(1, 1)?))
    }

    /// A verify of drafts after the tokens of the last step.
    fn resume(&mut self) -> Result<Gdn<'static>, Error> {
        const TOKENS: usize = 4;
        let step = self.layer([1, TOKENS], 1)?;
        Ok(step.previous(Previous::new(
            Stored::x(self.bf16(&[1, TOKENS, (2 * H + HV) * DIM])?),
            self.bf16(&[1, TOKENS, HV])?,
            self.bf16(&[1, TOKENS, HV])?,
            self.i32(&[1])?,
        )))
    }

    fn deferred(&mut self) -> Result<Gdn<'static>, Error> {
        let step = self.layer([1, 1], 1)?;
        Ok(step.pending(Pending::new(Rings {
            keys: self.f32(&[SLOTS, H, RING, DIM])?,
            updates: self.f32(&[SLOTS, HV, RING, DIM])?,
            decays: self.f32(&[SLOTS, HV, RING])?,
            len: self.i32(&[1])?,
            base: self.i32(&[1])?,
        })))
    }

    /// A mixed batch: a prompt, and rows that decode.
    fn prefill(&mut self) -> Result<Gdn<'static>, Error> {
        let step = self.layer([1, PROMPT + ROWS - 1], ROWS)?;
        let step = step
            .packed(self.i32(&[ROWS + 1])?, usize::MAX)
            .options(Options::default().formulation(Formulation::Chunked));
        let floats = step.workspace_bytes()? / size_of::<f32>();
        Ok(step.workspace(self.f32(&[floats])?))
    }
}

/// All cases, with their tensors one after the other from address `base`, and the number of bytes of these. The memory has to
/// exist when a case is launched, with any contents.
///
/// # Errors
/// None: the arguments are valid.
pub fn cases(base: u64) -> Result<(Vec<Case>, usize), Error> {
    let mut arena = Arena { next: base };
    let works: [(&str, Box<dyn Work>); 6] = [
        ("decode", Box::new(arena.decode()?)),
        ("layer, T = 1", Box::new(arena.layer([1, 1], 1)?)),
        ("KDA layer, T = 1", Box::new(arena.kda_layer()?)),
        ("layer, 4 drafts after 4", Box::new(arena.resume()?)),
        ("layer, deferred write-back", Box::new(arena.deferred()?)),
        ("prefill of a layer", Box::new(arena.prefill()?)),
    ];
    let cases = works.map(|(name, work)| Case { name, work });
    Ok((cases.into(), (arena.next - base) as usize))
}

/// The kernels of a launch, compiled, for bare launches.
pub struct Bare<'a> {
    driver: &'static Driver,
    stream: StreamRef<'a>,
    launches: Vec<(RawFunction, LaunchShape, Vec<u8>)>,
    /// Modules of the functions.
    modules: Vec<Module>,
}

impl<'a> Bare<'a> {
    /// The bare form of the launches of `work` in this context.
    pub fn new(context: &Context, stream: StreamRef<'a>, work: &dyn Work) -> Result<Self> {
        const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;
        let device = context.device();
        let count = device.attribute(attribute::MULTIPROCESSOR_COUNT)?;
        let recipe = work.recipe_for(count.unsigned_abs(), device.compute_capability()?)?;
        let mut bare = Self {
            driver: context.driver(),
            stream,
            launches: Vec::new(),
            modules: Vec::new(),
        };
        for launch in recipe.launches() {
            let (text, symbol) = (launch.kernel.ptx()?, launch.kernel.symbol());
            let module = Module::load(context, symbol, &CString::new(text)?)?;
            let function = module.function(&CString::new(symbol)?)?;
            if launch.shape.shared_bytes > DEFAULT_SHARED_BYTES {
                function.set_shared_bytes(launch.shape.shared_bytes)?;
            }
            let parameter = launch.parameter().to_vec();
            (bare.launches).push((function.raw(), launch.shape, parameter));
            bare.modules.push(module);
        }
        Ok(bare)
    }

    /// Number of kernels.
    #[must_use]
    pub fn kernels(&self) -> usize {
        self.launches.len()
    }

    /// Bytes of each kernel's parameter.
    #[must_use]
    pub fn parameter_bytes(&self) -> Vec<usize> {
        let launches = self.launches.iter();
        launches.map(|(.., parameter)| parameter.len()).collect()
    }

    /// Launches all kernels, and does nothing else.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The context is current, and the memory of the tensors stays until the stream has passed the launch.
    pub unsafe fn launch(&self) -> Result<(), Error> {
        for (function, shape, parameter) in &self.launches {
            let mut parameters = [parameter.as_ptr().cast_mut().cast::<c_void>()];
            let parameters = parameters.as_mut_ptr();
            let ([x, y, z], bytes) = (shape.grid, shape.shared_bytes);
            let stream = self.stream.raw();
            if shape.overlaps {
                let mut attribute = LaunchAttribute::OVERLAPS;
                let config = LaunchConfig {
                    grid: shape.grid,
                    block: [shape.block, 1, 1],
                    shared_bytes: bytes,
                    stream,
                    attributes: &raw mut attribute,
                    count: 1,
                };
                let config = &raw const config;
                // SAFETY: the function takes this parameter; the caller promises the rest.
                unsafe {
                    (self.driver).launch_kernel_ex(config, *function, parameters, null_mut())
                }?;
            } else {
                let block = shape.block;
                // SAFETY: as above.
                unsafe {
                    self.driver.launch_kernel(
                        *function,
                        x,
                        y,
                        z,
                        block,
                        1,
                        1,
                        bytes,
                        stream,
                        parameters,
                        null_mut(),
                    )
                }?;
            }
        }
        Ok(())
    }
}

/// Host time of a launch in ns, per kernel.
#[derive(Clone, Copy, Debug)]
pub struct HostCost {
    /// Number of kernels.
    pub kernels: usize,
    /// Time of a bare launch.
    pub bare: f64,
    /// Additional time of a bare launch after [`Context::enter`], which asks the driver whether the context is still the same.
    pub context: f64,
    /// Additional time of a launch of a plan.
    pub plan: f64,
    /// Additional time of a launch through the warm cache.
    pub cached: f64,
}

impl fmt::Display for HostCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_each = match self.kernels {
            1 => String::new(),
            kernels => format!(" for each of {kernels} kernels"),
        };
        let Self {
            bare,
            context,
            plan,
            cached,
            ..
        } = self;
        write!(
            f,
            "bare launch {bare:.0} ns{of_each}, plan + {plan:.0} ns, cache + {cached:.0} ns; asking the driver for the context \
             {context:.0} ns"
        )
    }
}

/// Host times of the launches of all cases: a line for each, and one for all together.
///
/// # Errors
/// The errors of the driver.
pub fn host_costs(library: &Library, stream: &Stream) -> Result<String> {
    let context = library.context().context("a library without a GPU")?;
    let (_, bytes) = cases(0)?;
    let mut memory = DeviceMemory::allocate(context, bytes)?;
    memory.fill(0)?;
    let base = memory.tensor(DType::U32, &[1])?.address();
    let (cases, _) = cases(base)?;
    let mut text = String::new();
    let mut all = Vec::new();
    for Case { name, work } in &cases {
        // SAFETY: the memory stays until this function has waited for the stream.
        let cost = unsafe { host_cost(library, stream, &**work) }.context(*name)?;
        text += &format!("host, {name}: {cost}\n");
        all.push(cost);
    }
    stream.synchronize()?;
    let range = |of: fn(&HostCost) -> f64| {
        let all = all.iter().map(of);
        let least = all.clone().fold(f64::INFINITY, f64::min);
        format!("{least:.0} to {:.0} ns", all.fold(0.0, f64::max))
    };
    let (plan, cached) = (range(|cost| cost.plan), range(|cost| cost.cached));
    Ok(text
        + &format!(
            "host: a plan {plan} over a bare launch of the same kernel, the cache {cached}\n"
        ))
}

/// Times the ways to launch `work` in turn. Differences are taken between neighbouring turns, so that they do not depend on a clock
/// that drifts.
///
/// # Safety
/// The memory of the tensors stays until the stream has passed the launches.
unsafe fn host_cost(library: &Library, stream: &Stream, work: &dyn Work) -> Result<HostCost> {
    let plan = library.plan(work)?;
    let bare = Bare::new(stream.context(), stream.as_ref(), work)?;
    let kernels = bare.kernels();
    let ways: [&dyn Fn() -> Result<(), Error>; 4] = [
        // SAFETY: the caller's promise; `turns` makes the context current.
        &|| unsafe { bare.launch() },
        &|| {
            let _current = stream.context().enter()?;
            // SAFETY: the caller's promise.
            unsafe { bare.launch() }
        },
        // SAFETY: as above.
        &|| unsafe { plan.launch(stream.as_ref(), work) },
        // SAFETY: as above.
        &|| unsafe { library.launch(stream.as_ref(), work) },
    ];
    let [bare, context, plan, cached] = turns(stream, kernels, ways)?;
    Ok(HostCost {
        kernels,
        bare,
        context,
        plan,
        cached,
    })
}

/// Median time per kernel of the first way, and the additional times of the others, in ns.
fn turns<const WAYS: usize>(
    stream: &Stream,
    kernels: usize,
    ways: [&dyn Fn() -> Result<(), Error>; WAYS],
) -> Result<[f64; WAYS]> {
    /// Kernels in a turn: fewer than a stream takes before a launch has to wait.
    const KERNELS: usize = 400;
    const ROUNDS: usize = 100;
    let calls = KERNELS / kernels;
    let mut samples = [[0.0; ROUNDS]; WAYS];
    let _current = stream.context().enter()?;
    for round in 0..ROUNDS {
        let mut nanos = [0.0; WAYS];
        for turn in 0..WAYS {
            // Each way comes at each place equally often.
            let way = (round + turn) % WAYS;
            stream.synchronize()?;
            let start = Instant::now();
            for _ in 0..calls {
                ways[way]()?;
            }
            nanos[way] = start.elapsed().as_nanos() as f64 / (calls * kernels) as f64;
        }
        stream.synchronize()?;
        let mut differences = nanos.map(|of_way| of_way - nanos[0]);
        differences[0] = nanos[0];
        for (samples, of_way) in samples.iter_mut().zip(differences) {
            samples[round] = of_way;
        }
    }
    Ok(samples.map(|mut nanos| {
        nanos.sort_by(f64::total_cmp);
        nanos[ROUNDS / 2]
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report of any GPU has these times: every case has kernels there.
    #[test]
    fn every_gpu_has_kernels_for_every_case() {
        for (multiprocessors, capability) in [
            (108, (8, 0)),
            (82, (8, 6)),
            (128, (8, 9)),
            (148, (10, 0)),
            (170, (12, 0)),
        ] {
            for case in cases(1 << 20).unwrap().0 {
                let recipe = case.work.recipe_for(multiprocessors, capability);
                let recipe =
                    recipe.unwrap_or_else(|error| panic!("{}, {capability:?}: {error}", case.name));
                assert!(recipe.launches().count() > 0);
            }
        }
    }
}
