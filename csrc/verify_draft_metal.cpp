#include "verify_draft_metal.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"
#include "verify_draft_params.h"
#include "verify_draft_source.h"

namespace exactspec {

namespace {

namespace metal = mlx::core::metal;

// Threads of a kernel whose threadgroups work alone: small groups spread over more cores.
constexpr int kSpreadThreads = 128;

int logits_dtype(const mx::array& a) {
  return a.dtype() == mx::float32   ? DTYPE_FLOAT32
      : a.dtype() == mx::float16 ? DTYPE_FLOAT16
                                 : DTYPE_BFLOAT16;
}

// Function constants of one call, by VerifyDraftConstant.
struct Constants {
  explicit Constants(const MetalCall& call)
      : ints{
            logits_dtype(call.inputs[VerifyDraft::TargetLogits]),
            logits_dtype(call.inputs[VerifyDraft::DraftRows]),
            static_cast<int>(call.options.draft),
            static_cast<int>(call.options.order),
            static_cast<int>(call.options.draft_order),
            static_cast<int>(call.options.rule.kind),
            static_cast<int>(call.options.logprobs)},
        bools{
            call.options.keyed,
            call.options.has_lengths,
            call.options.has_vocab,
            call.options.has_draft_stats,
            call.options.has_bitmask,
            call.target_filtered,
            call.draft_filtered,
            call.options.stats,
            call.operation == MetalOperation::Sample,
            call.operation == MetalOperation::VerifyTree,
            call.replacement} {}

  static constexpr int kFirstBool = FC_KEYED;

  metal::MTLFCList list() const {
    metal::MTLFCList constants;
    for (int i = 0; i < kFirstBool; ++i) {
      constants.emplace_back(&ints[i], MTL::DataType::DataTypeInt, i);
    }
    for (int i = 0; i <= FC_REPLACEMENT - kFirstBool; ++i) {
      constants.emplace_back(&bools[i], MTL::DataType::DataTypeBool, kFirstBool + i);
    }
    return constants;
  }

  std::string hash(const std::string& kernel) const {
    std::ostringstream out;
    out << kernel;
    for (int value : ints) {
      out << "_" << value;
    }
    for (bool value : bools) {
      out << "_" << value;
    }
    return out.str();
  }

  int ints[kFirstBool];
  bool bools[FC_REPLACEMENT - kFirstBool + 1];
};

MTL::ComputePipelineState*
get_kernel(mx::Stream stream, const std::string& name, const Constants& constants) {
  auto& device = metal::device(stream.device);
  mx::CompileOptions options;
  options.math_mode = mx::MathMode::Safe; // the checks for NaN depend on it
  auto library =
      device.get_library("exactspec", options, [] { return std::string(verify_draft_source); });
  return device.get_kernel(name, library, constants.hash(name), constants.list());
}

// Threads for a kernel: whole simdgroups, as many as it wants and the pipeline allows.
int threads_for(MTL::ComputePipelineState* kernel, int wanted) {
  int limit = static_cast<int>(kernel->maxTotalThreadsPerThreadgroup());
  int forced = metal_tuning().max_threads;
  int threads = std::min({forced > 0 ? forced : wanted, limit, static_cast<int>(MAX_THREADS)});
  return std::max(threads / LANES, 1) * LANES;
}

struct Geometry {
  int batch;
  int num_slots;
  int all_rows; // the target's and the draft's
  int num_rows; // those that kernels may read: the target's, and a dense draft's
  int row_blocks;
};

int num_blocks(int size) {
  return (size + DRAW_BLOCK - 1) / DRAW_BLOCK;
}

Geometry geometry(const MetalCall& call) {
  const auto& logits = call.inputs[VerifyDraft::TargetLogits];
  const auto& options = call.options;
  bool dense = options.draft == DraftKind::Dense;
  Geometry g;
  g.num_slots = call.num_slots;
  g.batch = static_cast<int>(call.status->size());
  bool reduces_draft =
      dense && !options.has_draft_stats && (options.stats || reads_draft(options.rule.kind));
  bool is_tree = call.operation == MetalOperation::VerifyTree;
  g.all_rows = is_tree ? 2 * g.num_slots + 2 : 2 * g.num_slots + 1;
  g.num_rows = reduces_draft ? g.all_rows : g.num_slots + 1;
  g.row_blocks = num_blocks(logits.shape(-1));
  if (dense) {
    g.row_blocks =
        std::max(g.row_blocks, num_blocks(call.inputs[VerifyDraft::DraftRows].shape(-1)));
  }
  return g;
}

// Batches that keep every core busy are best off with one threadgroup per sequence.
bool use_sequence_variant(mx::Stream stream, const MetalCall& call, const Geometry& g) {
  if (call.options.stats) {
    return false; // statistics need every row, so there is nothing to be lazy about
  }
  auto variant = metal_tuning().variant;
  if (variant != MetalVariant::Auto) {
    return variant == MetalVariant::Sequence;
  }
  // The last letter of the architecture tells the class of the GPU; core counts of its smaller parts.
  const auto& architecture = metal::device(stream.device).get_architecture();
  char size_class = architecture.empty() ? '?' : architecture.back();
  int cores = size_class == 'd' ? 60 : size_class == 's' ? 24 : size_class == 'p' ? 5 : 8;
  return g.batch >= cores || g.row_blocks == 1;
}

std::vector<std::string> kernels_of(mx::Stream stream, const MetalCall& call, const Geometry& g) {
  bool is_tree = call.operation == MetalOperation::VerifyTree;
  std::string prefix = is_tree ? "verify_tree_" : "verify_draft_";
  if (use_sequence_variant(stream, call, g)) {
    return {prefix + "sequence"};
  }
  std::vector<std::string> kernels{prefix + "partials"};
  if (call.target_filtered || call.draft_filtered) {
    kernels.push_back(prefix + "rows");
  }
  const auto& options = call.options;
  if (is_tree) {
    kernels.push_back("verify_tree_walk");
    return kernels;
  }
  if (options.draft == DraftKind::Dense && reads_draft(options.rule.kind) && g.num_slots > 0) {
    kernels.push_back("verify_draft_residual");
  }
  kernels.push_back("verify_draft_draw");
  if (options.stats && g.num_slots > 0) {
    kernels.push_back("verify_draft_stats");
  }
  return kernels;
}

// The stride of axis `axis` behind the batch axes.
int64_t stride(const mx::array& a, int core_rank, int axis) {
  return a.strides(static_cast<int>(a.ndim()) - core_rank + axis);
}

// From one sequence to the next. Batch axes are contiguous among themselves, so the innermost tells; an
// axis with one element may have any stride.
int64_t batch_stride(const mx::array& a, int core_rank) {
  int axis = static_cast<int>(a.ndim()) - core_rank - 1;
  while (axis >= 0 && a.shape(axis) == 1) {
    --axis;
  }
  return axis < 0 ? 0 : a.strides(axis);
}

VerifyDraftParams make_params(const MetalCall& call, const Geometry& g) {
  using V = VerifyDraft;
  const auto& in = call.inputs;
  const auto& o = call.options;
  VerifyDraftParams p{};
  p.num_slots = g.num_slots;
  p.vocab_size = in[V::TargetLogits].shape(-1);
  p.draft_width = o.draft == DraftKind::OneHot ? 0 : in[V::DraftRows].shape(-1);
  p.row_blocks = g.row_blocks;
  p.target_misalign = static_cast<int>(in[V::TargetLogits].offset() % 16);
  p.draft_misalign = static_cast<int>(in[V::DraftRows].offset() % 16);
  int target_rank = call.operation == MetalOperation::Sample ? 1 : 2;
  auto rows = [&](const mx::array& a, int rank, int64_t& batch, int64_t& row, int64_t& step) {
    batch = batch_stride(a, rank);
    row = rank == 2 ? stride(a, rank, 0) : 0;
    step = stride(a, rank, rank - 1);
  };
  rows(in[V::TargetLogits], target_rank, p.target_batch, p.target_row, p.target_step);
  if (o.draft != DraftKind::OneHot) {
    rows(in[V::DraftRows], 2, p.draft_batch, p.draft_row, p.draft_step);
  }
  if (o.draft == DraftKind::Sparse) {
    rows(in[V::DraftProbs], 2, p.probs_batch, p.probs_row, p.probs_step);
  }
  if (o.has_draft_stats) {
    rows(in[V::DraftStats], 2, p.stats_batch, p.stats_row, p.stats_step);
  }
  if (o.has_bitmask) {
    rows(in[V::Bitmask], target_rank, p.mask_batch, p.mask_row, p.mask_step);
  }
  if (g.num_slots > 0) {
    p.tokens_batch = batch_stride(in[V::DraftTokens], 1);
    p.tokens_step = stride(in[V::DraftTokens], 1, 0);
  }
  p.noise_batch = batch_stride(in[V::Noise], 1);
  p.noise_step = stride(in[V::Noise], 1, 0);
  p.lengths_batch = o.has_lengths ? batch_stride(in[V::DraftLengths], 0) : 0;
  if (call.operation == MetalOperation::VerifyTree && g.num_slots > 0) {
    p.parents_batch = batch_stride(in[V::DraftLengths], 1);
    p.parents_step = stride(in[V::DraftLengths], 1, 0);
  }
  p.positions_batch = o.rule.kind == Rule::Coupled ? batch_stride(in[V::Positions], 0) : 0;
  p.vocab_step = o.has_vocab ? in[V::DraftVocab].strides(0) : 0;
  for (int i = 0; i < 2 * kNumParameters; ++i) {
    p.parameters[i] = batch_stride(in[V::Parameters + i], 0);
  }
  std::copy(o.rule.parameters.begin(), o.rule.parameters.end(), p.rule_parameters);
  return p;
}

mx::array scratch(metal::CommandEncoder& encoder, mx::Shape shape) {
  mx::array a(std::move(shape), mx::float32, nullptr, {});
  a.set_data(mx::allocator::malloc(a.nbytes()));
  encoder.add_temporary(a);
  return a;
}

} // namespace

MetalTuning& metal_tuning() {
  static MetalTuning tuning;
  return tuning;
}

void prepare_metal(mx::Stream stream, const MetalCall& call) {
  Constants constants(call);
  for (const auto& name : kernels_of(stream, call, geometry(call))) {
    auto kernel = get_kernel(stream, name, constants);
    if (kernel->threadExecutionWidth() != LANES || kernel->maxTotalThreadsPerThreadgroup() < LANES) {
      throw std::runtime_error(
          "[exactspec] stream: expected a GPU with simdgroups of 32 threads and at least one in a "
          "threadgroup, got " + std::to_string(kernel->threadExecutionWidth()) + " and " +
          std::to_string(kernel->maxTotalThreadsPerThreadgroup()) + " threads");
    }
  }
}

void encode_metal(mx::Stream stream, MetalCall& call) {
  std::vector<mx::array*> outputs{call.tokens, call.status};
  outputs.insert(outputs.end(), call.stats.begin(), call.stats.end());
  for (auto* optional : {call.num_accepted, call.logprobs}) {
    if (optional) {
      outputs.push_back(optional);
    }
  }
  for (auto* out : outputs) {
    out->set_data(mx::allocator::malloc(out->nbytes()));
  }
  Geometry g = geometry(call);
  if (g.batch == 0) {
    return; // a grid without threads must not be dispatched
  }

  auto& encoder = metal::get_command_encoder(stream);
  mx::array partials = scratch(encoder, {g.batch, g.all_rows, g.row_blocks + 1, 4});
  mx::array mass = scratch(encoder, {g.batch, g.all_rows, g.row_blocks});
  mx::array dummy = scratch(encoder, {4});
  VerifyDraftParams params = make_params(call, g);
  bool by_block = call.options.rule.kind == Rule::Block;
  int regions = call.options.stats || by_block ? g.batch * g.num_slots : g.batch;
  mx::array scattered =
      call.options.has_vocab && g.num_slots > 0 ? scratch(encoder, {regions, params.vocab_size}) : dummy;

  bool has_digests = !reads_draft(call.options.rule.kind);
  mx::array digests =
      has_digests ? scratch(encoder, {g.batch, g.num_slots + 1, g.row_blocks, 2}) : dummy;

  bool is_tree = call.operation == MetalOperation::VerifyTree;
  mx::array removed =
      is_tree && g.num_slots > 0 ? scratch(encoder, {g.batch, g.num_slots, 2}) : dummy;

  Constants constants(call);
  for (const auto& name : kernels_of(stream, call, g)) {
    auto kernel = get_kernel(stream, name, constants);
    encoder.set_compute_pipeline_state(kernel);
    for (int i = 0; i < BUF_PARAMS; ++i) {
      static_assert(int{BUF_PARAMETERS} == int{VerifyDraft::Parameters});
      const auto& input = call.inputs[i];
      encoder.set_input_array(input.size() > 0 ? input : dummy, i);
    }
    encoder.set_bytes(params, BUF_PARAMS);
    encoder.set_output_array(partials, BUF_PARTIALS);
    encoder.set_output_array(mass, BUF_MASS);
    encoder.set_output_array(scattered, BUF_SCATTERED);
    encoder.set_output_array(digests, BUF_DIGESTS);
    encoder.set_output_array(*call.tokens, BUF_TOKENS);
    encoder.set_output_array(call.num_accepted ? *call.num_accepted : dummy, BUF_NUM_ACCEPTED);
    encoder.set_output_array(*call.status, BUF_STATUS);
    encoder.set_output_array(call.logprobs ? *call.logprobs : dummy, BUF_LOGPROBS);
    for (int i = 0; i < 4; ++i) {
      bool given = i < static_cast<int>(call.stats.size()) && call.stats[i]->size() > 0;
      encoder.set_output_array(given ? *call.stats[i] : dummy, BUF_STATS + i);
    }
    if (is_tree) {
      encoder.set_output_array(removed, BUF_REMOVED);
    }

    bool per_row = name.ends_with("_partials") || name.ends_with("_rows");
    bool spread = name.ends_with("_partials") || name.ends_with("_residual");
    int wanted = spread ? kSpreadThreads : MAX_THREADS;
    if (name == "verify_draft_residual") {
      // With a vocabulary map each group looks at all columns, by the block rule it walks along the draft
      // for every slot: few groups are better.
      wanted = call.options.has_vocab ? MAX_THREADS : by_block ? 2 * kSpreadThreads : kSpreadThreads;
    }
    int threads = threads_for(kernel, wanted);
    int groups = spread ? (g.row_blocks + threads / LANES - 1) / (threads / LANES) : 1;
    if (name == "verify_draft_stats") {
      groups = g.num_slots;
    }
    int rows = 1;
    if (per_row) {
      rows = g.num_rows;
    } else if (name == "verify_draft_residual" && by_block) {
      rows = g.num_slots;
    }
    encoder.dispatch_threadgroups(MTL::Size(groups, rows, g.batch), MTL::Size(threads, 1, 1));
  }
}

namespace {

MetalCall verify_call(
    const VerifyDraft::Options& options,
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  bool has_logprobs = options.logprobs != Logprobs::None;
  MetalCall call{
      options,
      MetalOperation::VerifyDraft,
      true,
      options.target_filtered,
      options.draft == DraftKind::Dense && !options.has_draft_stats && options.draft_filtered &&
          (options.stats || reads_draft(options.rule.kind)),
      inputs[VerifyDraft::DraftTokens].shape(-1),
      inputs,
      &outputs[0],
      &outputs[1],
      &outputs[2],
      has_logprobs ? &outputs[3] : nullptr,
      {}};
  for (size_t i = 3 + has_logprobs; i < outputs.size(); ++i) {
    call.stats.push_back(&outputs[i]);
  }
  return call;
}

} // namespace

void VerifyDraft::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto call = verify_call(options_, inputs, outputs);
  encode_metal(stream(), call);
}

void VerifyDraft::prepare(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  prepare_metal(stream(), verify_call(options_, inputs, outputs));
}

} // namespace exactspec
