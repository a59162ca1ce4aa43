// Operators that run after the backward pass: gradient check and loss scale, gradient clipping, optimizers, lookahead
// and EMA. Each operator processes the tensors of all parameters. On a GPU, an operator launches its kernels in
// update.cu once per table of tensors; on the CPU, it calls the reference implementation.

#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "gpu.h"
#include "optimizers.h"
#include "reference/functions.h"
#include "tensors.h"

namespace {

// Returns the address of a GPU tensor with `size` elements.
void *address(const Tensor &tensor, int64_t size) {
  void *data = const_cast<void *>(tensor.data());
  if (!tensor.is_gpu()) PD_THROW("custom update: a tensor is not on the GPU");
  if (tensor.numel() != size) PD_THROW("custom update: the sizes of the tensors differ");
  if (size >= 1 << 30) PD_THROW("custom update: requires parameters with fewer than 2^30 elements");
  if (reinterpret_cast<uintptr_t>(data) % kVectorBytes)
    PD_THROW("custom update: the address of a tensor is not a multiple of 16 bytes");
  return data;
}

float *floats(const Tensor &tensor, int64_t size) {
  if (tensor.dtype() != DataType::FLOAT32)
    PD_THROW("custom update: requires float32 state, master weights and averages");
  return static_cast<float *>(address(tensor, size));
}

// Tensors of one data type, divided into tables. Each table is the argument of one kernel launch.
template <class Table>
class Tables {
 public:
  // Adds a gradient to the last table, or to a new table if the last table is full. Returns this table.
  Table &add(const Tensor &gradient) {
    if (tables_.empty() || tables_.back().count == Table::kTensors) tables_.emplace_back();
    Table &table = tables_.back();
    const int t = table.count++;
    table.gradient[t] = address(gradient, gradient.numel());
    table.size[t] = static_cast<int>(gradient.numel());
    return table;
  }

  // Calls launch(table) for each table.
  template <class Launch>
  void launch(const Launch &launch) {
    for (Table &table : tables_) launch(table);
  }

 private:
  std::vector<Table> tables_;
};

std::vector<unsigned> update_grid() { return {static_cast<unsigned>(Gpu::get().blocks()), 1}; }
std::vector<unsigned> update_block() { return {kMaxThreads, 1}; }

// Checks whether all gradients are finite, then updates the loss scale and its counters in place. Returns a tensor [1]
// that contains the inverse of the previous loss scale, or 0 if a gradient is not finite.
std::vector<Tensor> CheckFinite(const Tensors &gradients, Tensor &scale, Tensor &good_steps, Tensor &bad_steps,
                                int raise_after_steps, int lower_after_steps, float raise_by, float lower_by) {
  LossScaling rule = {raise_after_steps, lower_after_steps, raise_by, lower_by};
  Tensor unscale = paddle::empty({1}, DataType::FLOAT32, scale.place());
  float *s = scale.data<float>(), *u = unscale.data<float>();
  int *good = good_steps.data<int>(), *bad = bad_steps.data<int>();
  if (scale.is_gpu()) {
    std::map<std::string, Tables<Gradients>> by_type;
    for (const Tensor &gradient : gradients) by_type[suffix(gradient)].add(gradient);
    void *overflow = Gpu::get().overflow();
    for (auto &[type, tables] : by_type) {
      const std::string name = "check_gradients" + type;
      tables.launch([&](Gradients &updates) {
        Gpu::get().launch(name, scale, update_grid(), update_block(), {&updates, &overflow});
      });
    }
    Gpu::get().launch("follow_loss_scale", scale, {1, 1}, {1, 1}, {&overflow, &rule, &s, &good, &bad, &u});
    return {unscale};
  }
  bool is_finite = true;
  for (const Tensor &gradient : gradients) {
    require_float32(gradient);
    is_finite &= reference::is_finite(data<float>(gradient), gradient.numel());
  }
  *u = is_finite ? 1 / *s : 0;
  rule.follow(!is_finite, s, good, bad);
  return {unscale};
}

// Returns a tensor [1] that contains the factor that unscales the gradients and limits their global norm: unscale *
// min(1, max_norm / |unscale gradients|). `unscale` is the result of CheckFinite. The factor is 0 if the step must be
// skipped. If the step is not skipped and the norm is not finite, the factor is NaN.
std::vector<Tensor> ClipFactor(const Tensors &gradients, const paddle::optional<Tensor> &unscale, float max_norm) {
  Tensor factor = paddle::empty({1}, DataType::FLOAT32, gradients.at(0).place());
  const float *u = unscale ? unscale->data<float>() : nullptr;
  float *result = factor.data<float>();
  if (factor.is_gpu()) {
    std::map<std::string, Tables<Gradients>> by_type;
    for (const Tensor &gradient : gradients) by_type[suffix(gradient)].add(gradient);
    void *partial = Gpu::get().partial();  // one sum per block
    bool is_first = true;
    for (auto &[type, tables] : by_type) {
      const std::string name = "sum_squares" + type;
      tables.launch([&](Gradients &updates) {
        Gpu::get().launch(name, factor, update_grid(), update_block(), {&updates, &u, &partial, &is_first});
        is_first = false;
      });
    }
    int sums = Gpu::get().blocks();
    Gpu::get().launch("clip_factor", factor, {1, 1}, update_block(), {&partial, &sums, &u, &max_norm, &result});
    return {factor};
  }
  double squares = 0;
  for (const Tensor &gradient : gradients) {
    require_float32(gradient);
    squares += reference::sum_squares(data<float>(gradient), gradient.numel(), u ? *u : 1);
  }
  *result = clipped(static_cast<float>(std::sqrt(squares)), u ? *u : 1, max_norm);
  return {factor};
}

// Updates exponential moving averages in place: average += weight (value - average). `unscale` is the result of
// CheckFinite or ClipFactor. If `unscale` is 0, the step is skipped.
void Ema(Tensors &averages, const Tensors &values, const Tensor &weight, const paddle::optional<Tensor> &unscale) {
  if (values.size() != averages.size()) PD_THROW("custom EMA: requires one value per average");
  const float *w = weight.data<float>(), *factor = unscale ? unscale->data<float>() : nullptr;
  if (weight.is_gpu()) {
    for (size_t begin = 0; begin < averages.size(); begin += Averages::kTensors) {
      Averages table = {};
      for (size_t i = begin; i < averages.size() && table.count < Averages::kTensors; ++i) {
        const int t = table.count++;
        table.size[t] = static_cast<int>(averages[i].numel());
        table.average[t] = floats(averages[i], averages[i].numel());
        table.value[t] = floats(values[i], averages[i].numel());
      }
      Gpu::get().launch("follow_averages", weight, update_grid(), update_block(), {&table, &w, &factor});
    }
    return;
  }
  if (factor && *factor == 0) return;
  for (size_t i = 0; i < averages.size(); ++i) {
    require_float32(values[i]);
    require_like(averages[i], values[i], "value");
    reference::follow_average(data<float>(values[i]), averages[i].numel(), *w, averages[i].data<float>());
  }
}

#define NAME_OF(RULE) \
  std::string name_of(optimizer::RULE) { return #RULE; }
FOR_EACH_OPTIMIZER(NAME_OF)

// Updates parameters in place. `state` contains, for each state tensor of the rule, one tensor per parameter or, if the
// parameters share it, a single tensor. The float32 master weights of half-precision parameters come last. `unscale` is
// the result of CheckFinite or ClipFactor.
template <class Rule>
void Update(Tensors &parameters, const Tensors &gradients, Tensors &state, const Tensor &rate,
            const paddle::optional<Tensor> &unscale, const std::vector<float> &hyperparameters,
            const std::vector<float> &decays) {
  const size_t count = parameters.size();
  const size_t copies = Rule::kSharesRest ? 1 : count;  // number of tensors per one-element state
  const size_t masters = Rule::kVectors * count + (Rule::kStates - Rule::kVectors) * copies;
  const auto state_of = [&](int s, size_t i) -> Tensor & {
    if (s < Rule::kVectors) return state[s * count + i];
    return state[Rule::kVectors * count + (s - Rule::kVectors) * copies + (Rule::kSharesRest ? 0 : i)];
  };
  const bool has_masters = state.size() == masters + count;
  if (gradients.size() != count || decays.size() != count || (!has_masters && state.size() != masters))
    PD_THROW("custom update: requires a gradient, state and decay for each parameter");
  Rule rule;
  if (hyperparameters.size() * sizeof(float) != sizeof(rule)) PD_THROW("custom update: hyperparameters are missing");
  std::memcpy(&rule, hyperparameters.data(), sizeof(rule));
  const float *lr = rate.data<float>(), *factor = unscale ? unscale->data<float>() : nullptr;
  if (rate.is_gpu()) {
    using Table = Updates<Rule::kStates>;
    static_assert(!Rule::kHasTrustRatio || 2 * Table::kTensors <= kMaxLanes * kVectorBytes,
                  "the sums of squares exceed the scratch memory");
    std::map<std::string, Tables<Table>> by_type;
    for (size_t i = 0; i < count; ++i) {
      if (gradients[i].dtype() != parameters[i].dtype())
        PD_THROW("custom update: the types of a gradient and its parameter differ");
      if (!has_masters && parameters[i].dtype() != DataType::FLOAT32)
        PD_THROW("custom update: parameters in half precision require float32 master weights");
      Table &table = by_type[suffix(parameters[i])].add(gradients[i]);
      const int t = table.count - 1, size = table.size[t];
      table.parameter[t] = address(parameters[i], size);
      table.master[t] = has_masters ? floats(state[masters + i], size) : nullptr;
      for (int s = 0; s < Rule::kStates; ++s) table.state[s][t] = floats(state_of(s, i), s < Rule::kVectors ? size : 1);
      table.decay[t] = decays[i];
    }
    void *partial = Gpu::get().partial();  // kMaxLanes * kVectorBytes floats per block
    for (auto &[type, tables] : by_type) {
      const std::string end = (has_masters ? "_masters" : "") + type;
      tables.launch([&](Table &table) {
        const auto launch = [&](const std::string &name, std::vector<void *> arguments) {
          Gpu::get().launch(name, rate, update_grid(), update_block(), std::move(arguments));
        };
        if (Rule::kHasTrustRatio) launch(name_of(rule) + "_norms" + end, {&table, &rule, &factor, &partial});
        launch(name_of(rule) + end, {&table, &rule, &lr, &factor, &partial});
        if (Rule::kStates > Rule::kVectors && !Rule::kSharesRest)
          Gpu::get().launch("advance_" + name_of(rule), rate, {1, 1}, {Table::kTensors, 1}, {&table, &rule, &factor});
      });
    }
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    require_float32(gradients[i]);
    float *of_parameter[Rule::kStates];
    for (int s = 0; s < Rule::kStates; ++s) of_parameter[s] = state_of(s, i).template data<float>();
    reference::update_in_parallel(data<float>(gradients[i]), parameters[i].numel(), *lr, factor ? *factor : 1, rule,
                                  decays[i], of_parameter, parameters[i].data<float>(),
                                  has_masters ? state[masters + i].template data<float>() : nullptr);
  }
}

}  // namespace
